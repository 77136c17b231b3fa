"""Gradient accumulation: rows hold unequal numbers of labels, and a step has four micro batches.

What a step finds is compared with torch's own mean cross entropy over all rows at once.
"""

import torch
import torch.nn.functional as F

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.runs import (
    MOE,
    assembled,
    assert_equal,
    assert_same_gradients,
    first_step,
    gradients_of,
)
from trainer.engine.data.batch import IGNORED
from trainer.engine.tasks.language_modeling.next_token import NextToken
from trainer.engine.tasks.tables import CrossEntropy
from trainer.engine.train.step import TrainStep
from trainer.model_zoo.layers.router import Router


def mean_over_all_rows(parts, batches):
    """Return torch's mean cross entropy of all rows, and the gradients that it has."""
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    logits = parts.model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    gradients = gradients_of(parts)
    parts.model.zero_grad()
    return loss.item(), gradients


def assert_a_step_has_the_mean(batches=None, **changes):
    parts = assembled(**changes)
    batches = batches or next(parts.loader.steps(0))
    assert len(batches) > 1
    loss, gradients = mean_over_all_rows(parts, batches)
    found = parts.step.accumulate(batches)
    assert_equal(found.loss, loss, "loss")
    assert_same_gradients(gradients_of(parts), gradients)
    return parts


def labels(batch):
    return (batch.labels != IGNORED).sum()


def average_micro_batches(patch):
    """Make the loss of a step the mean of the micro batches' means."""
    original = TrainStep._forward_backward

    def forward_backward(self, batches, factor, before_update):
        total = sum(map(labels, batches))
        pieces = [
            original(self, [batch], factor * total / (len(batches) * labels(batch)), before_update)
            for batch in batches
        ]
        return torch.stack(pieces).sum(0)

    patch.setattr(TrainStep, "_forward_backward", forward_backward)


@known_bug(
    "huggingface/transformers#34191",
    "Each micro batch divided its loss by its own number of labels, so that a step minimised a"
    " mean of means and short rows weighed more.",
    average_micro_batches,
)
def micro_batches_of_unequal_lengths_have_the_gradient_of_one_batch():
    assert_a_step_has_the_mean()


def leave_out_the_division(patch):
    original = NextToken.factors
    patch.setattr(NextToken, "factors", lambda self, counts, scale: original(self, counts, 4.0))


@known_bug(
    "huggingface/transformers#35207",
    "The loss of a micro batch was no longer divided by the accumulation steps, so that gradients"
    " grew with their number.",
    leave_out_the_division,
)
def gradients_do_not_grow_with_the_number_of_micro_batches():
    parts = assembled()
    found = parts.step.accumulate(next(parts.loader.steps(0)))
    once = assembled(data={"micro_batch": 4})
    assert len(next(once.loader.steps(0))) == 1
    _, gradients = mean_over_all_rows(once, next(once.loader.steps(0)))
    assert_same_gradients(gradients_of(parts), gradients)
    assert_equal(found.norm, sum((g**2).sum() for g in gradients.values()) ** 0.5)


def forget_earlier_micro_batches(patch):
    original = TrainStep._forward_backward

    def forward_backward(self, batches, factor, before_update):
        pieces = []
        for batch in batches:
            self.optimizer.zero_grad()
            pieces.append(original(self, [batch], factor, before_update))
        return torch.stack(pieces).sum(0)

    patch.setattr(TrainStep, "_forward_backward", forward_backward)


@known_bug(
    "allenai/open-instruct#1498",
    "Every backward pass was taken for the last of its step and reset the accumulator, so that"
    " only the last micro batch trained the model.",
    forget_earlier_micro_batches,
)
def every_micro_batch_adds_to_the_gradient():
    assert_a_step_has_the_mean()


def report_the_sum_of_means(patch):
    def mean_loss(self, sums, counts):
        return sums[1] / counts[0].clamp(min=1) * 4

    patch.setattr(NextToken, "mean_loss", mean_loss)


@known_bug(
    "huggingface/transformers#37766",
    "The loss in the log was a sum over micro batches, and grew with the accumulation steps"
    " although nothing else changed.",
    report_the_sum_of_means,
)
def the_loss_in_the_log_does_not_depend_on_accumulation():
    parts = assembled()
    batches = next(parts.loader.steps(0))
    loss, _ = mean_over_all_rows(parts, batches)
    found = parts.step.accumulate(batches)
    assert_equal(parts.step.metrics(found, 0.1)["loss"], loss)


def count_the_first_token_of_a_row(patch):
    original = NextToken.counts
    patch.setattr(NextToken, "counts", lambda self, batch: original(self, batch) + len(batch))


@known_bug(
    "huggingface/transformers#46204",
    "The labels that a step is divided by were counted before they were shifted, one too many a"
    " row, so that all gradients were too small.",
    count_the_first_token_of_a_row,
)
def a_step_is_divided_by_the_labels_that_it_learns():
    assert_a_step_has_the_mean(data={"micro_batch": 2})


def scale_router_losses(factor):
    """Return what multiplies a micro batch's balancing loss by a function of its rows."""

    def put_in(patch):
        original = Router._balance_loss

        def balance_loss(self, shares, chosen, sequences, tokens):
            return original(self, shares, chosen, sequences, tokens) * factor(sequences)

        patch.setattr(Router, "_balance_loss", balance_loss)

    return put_in


def assert_router_losses_do_not_depend_on_micro_batches():
    first, *others = [first_step({"model": MOE, "data": {"micro_batch": n}}) for n in (1, 2, 4)]
    for found in others:
        assert_equal(found["total_loss"], first["total_loss"])
        assert_same_gradients(found["gradients"], first["gradients"])


@known_bug(
    "NVIDIA-NeMo/Automodel#3359",
    "The balancing loss of experts entered each micro batch in full, and weighed more the more"
    " gradients were accumulated.",
    scale_router_losses(lambda rows: 4 / rows),
)
def router_losses_do_not_grow_with_accumulation():
    assert_router_losses_do_not_depend_on_micro_batches()


@known_bug(
    "NVIDIA/Megatron-LM#5798",
    "The balancing loss of sequences was divided by the rows of a micro batch once too often.",
    scale_router_losses(lambda rows: 1 / rows),
)
def router_losses_do_not_shrink_with_the_rows_of_a_micro_batch():
    assert_router_losses_do_not_depend_on_micro_batches()


def average_the_z_loss_over_rows(patch):
    original = CrossEntropy.build

    def build(self, kernels):
        return original(self.model_copy(update={"z_loss": self.z_loss * 16}), kernels)

    patch.setattr(CrossEntropy, "build", build)


@known_bug(
    "allenai/OLMo#634",
    "The z-loss was a mean over rows and not over tokens, too large by the tokens of a row.",
    average_the_z_loss_over_rows,
)
def the_z_loss_is_a_mean_over_tokens():
    parts = assembled(loss={"z_loss": 0.1})
    batches = next(parts.loader.steps(0))
    with torch.no_grad():
        kept = torch.cat([batch.labels for batch in batches]) != IGNORED
        logits = parts.model(torch.cat([batch.tokens for batch in batches])).double()
        expected = 0.1 * logits.logsumexp(-1)[kept].square().mean()
    found = parts.step.accumulate(batches)
    assert_equal(found.total_loss - found.loss, expected)
