"""Data parallel ranks: what two ranks compute together is what one process computes."""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import (
    assembled,
    assert_equal,
    assert_first_step_as_alone,
)
from trainer.engine.data.batch import IGNORED
from trainer.engine.parallel.fsdp import ShardedParts
from trainer.engine.parallel.gradient_reduction import ReplicaParts
from trainer.engine.tasks.language_modeling.next_token import NextToken
from trainer.engine.train import update
from trainer.engine.train.evaluate import validate
from trainer.engine.train.step import TrainStep

DDP = {"replicate": 2, "shard": 1}
FSDP = {"shard": 2}


def count_on_this_rank_alone(patch):
    """Divide by the labels of this rank, and average the ranks."""
    original = TrainStep._sum_over_ranks

    def sum_over_ranks(self, tensor, num_equal=1):
        if tensor.is_floating_point():
            original(self, tensor, num_equal)
        else:
            tensor.mul_(self.degrees.world // num_equal)

    patch.setattr(TrainStep, "_sum_over_ranks", sum_over_ranks)


@known_bug(
    "verl-project/verl#3994",
    "Each rank divided its loss by its own tokens before gradients were averaged, so that tokens"
    " of ranks with short rows weighed more.",
    count_on_this_rank_alone,
    world=2,
)
def ranks_with_unequal_numbers_of_labels_have_one_mean():
    assert_first_step_as_alone(2, DDP)


def divide_by_all_items_on_each_gpu(patch):
    original = NextToken.factors

    def factors(self, counts, scale):
        return original(self, counts, scale) / dist.get_world_size()

    patch.setattr(NextToken, "factors", factors)


@known_bug(
    "huggingface/transformers#40610",
    "Each GPU divided by the items of all GPUs, and the average over GPUs divided once more.",
    divide_by_all_items_on_each_gpu,
    world=2,
)
def the_mean_over_ranks_divides_once():
    assert_first_step_as_alone(2, FSDP)


def report_this_rank_s_loss(patch):
    original = TrainStep._sum_over_ranks

    def sum_over_ranks(self, tensor, num_equal=1):
        before = tensor.clone()
        original(self, tensor, num_equal)
        if tensor.is_floating_point():
            tensor.copy_(before)

    patch.setattr(TrainStep, "_sum_over_ranks", sum_over_ranks)


@known_bug(
    "AMD-AGI/Primus#1055",
    "The loss that was reported was that of ranks taken apart instead of a sum over all divided"
    " by the count over all, and ranks disagreed about it.",
    report_this_rank_s_loss,
    world=2,
)
def every_rank_reports_the_loss_of_all():
    assert_first_step_as_alone(2, DDP)


def scale_by_all_ranks(patch):
    patch.setattr(
        TrainStep, "loss_factor", property(lambda self: self.scale.value * self.degrees.world)
    )


@known_bug(
    "meta-pytorch/torchtune#2641",
    "Gradients were scaled by the world size instead of the data parallel size, which is too much"
    " by the tensor parallel degree.",
    scale_by_all_ranks,
    world=2,
)
def gradients_are_scaled_by_the_data_parallel_size():
    assert_first_step_as_alone(2, {"tensor": 2, "shard": 1})


def double_before_each_micro_batch(patch):
    original = TrainStep._forward_backward

    def forward_backward(self, batches, factor, before_update):
        pieces = []
        for batch in batches:
            for weight in self.parallel_model.model.parameters():
                if weight.grad is not None:
                    weight.grad.mul_(2)
            pieces.append(original(self, [batch], factor, before_update))
        return torch.stack(pieces).sum(0)

    patch.setattr(TrainStep, "_forward_backward", forward_backward)


@known_bug(
    "NVIDIA/Megatron-LM#6660",
    "Where a group of ranks had one member, the gradients of earlier micro batches were added to"
    " themselves in each further one.",
    double_before_each_micro_batch,
    world=2,
)
def sharded_gradients_add_up_once_over_micro_batches():
    parallel = {"shard": 2, "fsdp": {"reduce_every": "micro_batch"}}
    assert_first_step_as_alone(2, parallel)


def never_synchronize(patch):
    original = ReplicaParts.wrap

    def wrap(self, wrapped, parts, settings):
        wrapped = original(self, wrapped, parts, settings)
        return replace(wrapped, set_gradient_sync=lambda last: synchronize(wrapped, last))

    def synchronize(wrapped, last):
        wrapped.set_gradient_sync(False)

    patch.setattr(ReplicaParts, "wrap", wrap)


@known_bug(
    "verl-project/verl#7493",
    "With a sharding group of one rank on several GPUs no gradient was reduced at all, and each"
    " GPU trained a model of its own.",
    never_synchronize,
    world=2,
)
def replicas_without_sharding_reduce_their_gradients():
    assert_first_step_as_alone(2, {"fsdp": {"strategy": "no_shard"}, "shard": 2})


def first_updates(changes):
    """Return the weights after two steps."""
    parts = assembled(**changes)
    batches = parts.loader.steps(0)
    for _ in range(2):
        parts.step.accumulate(next(batches))
        parts.step.update(1.0)
        parts.step.clear()
    return {
        name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().double().numpy()
        for name, w in parts.model.named_parameters()
    }


def skip_parameters_without_a_shard(patch):
    original = ShardedParts.wrap

    def wrap(self, wrapped, parts, settings):
        wrapped = original(self, wrapped, parts, settings)
        object.__setattr__(wrapped, "post_backward_reductions", [])
        return wrapped

    patch.setattr(ShardedParts, "wrap", wrap)


@known_bug(
    "areal-project/AReaL#313",
    "Parameters outside of the sharded modules were replicated, but their gradients were reduced"
    " by nobody.",
    skip_parameters_without_a_shard,
    world=2,
)
def parameters_that_are_not_sharded_stay_equal_on_all_ranks():
    rule = {"match": r".*norm\.weight", "place": {}}
    changes = {"parallel": {"shard": 2, "rules": [rule]}}
    expected = alone(first_updates, {})
    for found in on_ranks(2, first_updates, changes):
        for name, weight in found.items():
            assert_equal(weight, expected[name], name)


def norm_of_local_shards(patch):
    def global_norm(gradients, num_holders, device):
        return torch.nn.utils.get_total_norm([part for _, part in gradients])

    patch.setattr(update, "global_norm", global_norm)


@known_bug(
    "pytorch/pytorch#170862",
    "The gradient norm of sharded parameters was that of the rank's own shards, and each rank"
    " clipped by another factor.",
    norm_of_local_shards,
    world=2,
)
def the_norm_of_sharded_gradients_is_that_of_all_shards():
    assert_first_step_as_alone(2, FSDP)


def add_up_whole_gradients(patch):
    original = update.global_norm
    patch.setattr(
        update, "global_norm", lambda gradients, holders, device: original(gradients, 1, device)
    )


@known_bug(
    "modelscope/twinkle#290",
    "Gradients that every rank held whole were summed over ranks once more in the norm, and"
    " clipped although they were below the limit.",
    add_up_whole_gradients,
    world=2,
)
def the_norm_of_replicated_gradients_counts_them_once():
    assert_first_step_as_alone(2, DDP)


def evaluated(changes):
    """Return the loss of the validation split."""
    parts = assembled(**changes)
    return validate(parts)["loss"]


VALIDATION = {
    "data": {"validation_fraction": 0.3, "micro_batch": 2},
    "evaluate": {"steps": 0, "interval": 1},
}


def average_batches_of_validation(patch):
    original = NextToken.evaluation_counts

    def counts(self, batch):
        return torch.full_like(original(self, batch), 10)

    patch.setattr(NextToken, "evaluation_counts", counts)


@known_bug(
    "PrimeIntellect-ai/prime-rl#1850",
    "The validation loss was a mean over batches of all ranks, whatever number of tokens each"
    " batch had.",
    average_batches_of_validation,
    world=2,
)
def the_validation_loss_of_ranks_is_a_mean_over_labels():
    expected = alone(labels_of_validation, VALIDATION)
    for found in on_ranks(2, evaluated, {**VALIDATION, "parallel": DDP}):
        assert_equal(found, expected)


@known_bug(
    "pytorch/torchtitan#4167",
    "The validation loss was a mean of the means of batches, so that batches of few labels weighed"
    " as much as others.",
    average_batches_of_validation,
)
def batches_of_validation_weigh_by_their_labels():
    assert_equal(evaluated(VALIDATION), labels_of_validation(VALIDATION))


def labels_of_validation(changes):
    """Return torch's mean cross entropy of all rows of the split."""
    parts = assembled(**changes)
    tokens = torch.cat([batch.tokens for batch in parts.splits[0].batches])
    labels = torch.cat([batch.labels for batch in parts.splits[0].batches])
    logits = parts.model(tokens).flatten(0, 1)
    mean = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    return mean.item()
