"""Context parallel and ring attention: two ranks that share sequences find what one finds."""

from dataclasses import replace

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import assembled, assert_equal, assert_first_step_as_alone, gradients_of
from trainer.engine.data.batch import IGNORED
from trainer.engine.parallel.context import ring
from trainer.engine.parallel.context.context import ContextParallel
from trainer.engine.parallel.plan import Plan
from trainer.engine.tasks.language_modeling.next_token import NextToken
from trainer.model_zoo.layers.attention import GroupedQueryAttention

CONTEXT = {"context": 2, "shard": 1}
RING = {**CONTEXT, "context_exchange": "ring"}


def reduce_over_data_ranks_alone(patch):
    original = Plan.parallelize

    def parallelize(self, *args, **options):
        wrapped = original(self, *args, **options)
        return replace(wrapped, gradient_divisor=self.degrees.data)

    patch.setattr(Plan, "parallelize", parallelize)


@known_bug(
    "NVIDIA/Megatron-LM#906",
    "The loss was scaled for an average over one group of ranks while gradients were averaged"
    " over another.",
    reduce_over_data_ranks_alone,
    world=2,
)
def context_ranks_count_in_the_average_of_gradients():
    assert_first_step_as_alone(2, CONTEXT)


def shift_after_the_split(patch):
    original = ContextParallel.take

    def take(self, batch):
        part = original(self, batch)
        return replace(part, labels=part.tokens.roll(-1, 1))

    patch.setattr(ContextParallel, "take", take)


@known_bug(
    "verl-project/verl#4250",
    "Labels were shifted after sequences had been split, so that the last position of each part"
    " was to predict the first token of the part.",
    shift_after_the_split,
    world=2,
)
def the_end_of_a_part_predicts_the_token_of_the_next_part():
    assert_first_step_as_alone(2, CONTEXT, data={"packing": "concat"})


def number_positions_on_each_rank(patch):
    original = ContextParallel.take

    def take(self, batch):
        part = original(self, batch)
        return replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))

    patch.setattr(ContextParallel, "take", take)


@known_bug(
    "meta-pytorch/torchtune#2879",
    "Rotary angles were those of the places within a rank's part, not within the sequence.",
    number_positions_on_each_rank,
    world=2,
)
def positions_are_numbered_before_sequences_are_split():
    assert_first_step_as_alone(2, CONTEXT)


def masked_half(changes):
    """Return loss and gradients of a step in which one rank's positions have no labels."""
    parts = assembled(**changes)
    whole_batches = next(parts.loader.steps(0))
    masked = []
    for batch in whole_batches:
        # Of 16 positions, a rank of two holds the middle: see `ContextParallel.pieces`.
        positions = torch.arange(16).expand(len(batch), -1)
        positions = batch.positions if batch.positions is not None else positions
        in_the_middle = (positions >= 4) & (positions < 12)
        masked.append(replace(batch, labels=batch.labels.masked_fill(in_the_middle, IGNORED)))
    found = parts.step.accumulate(masked)
    labels = sum(int((batch.labels != IGNORED).sum()) for batch in masked)
    return {"loss": found.loss.item(), "labels": labels, "gradients": gradients_of(parts)}


def average_own_labels(patch):
    original = NextToken.forward

    def forward(self, model, batch, record):
        own = (batch.labels != IGNORED).sum()
        return original(self, model, batch, record) / own * own

    patch.setattr(NextToken, "forward", forward)


@known_bug(
    "NVIDIA/Megatron-LM#1764",
    "A rank whose part of a sequence had no labels divided zero by zero, and all gradients became"
    " NaN.",
    average_own_labels,
    world=2,
)
def a_rank_without_labels_adds_nothing():
    expected = alone(masked_half, {})
    found = on_ranks(2, masked_half, {"parallel": CONTEXT})
    assert min(step["labels"] for step in found) == 0
    for step in found:
        assert_equal(step["loss"], expected["loss"], "loss")
        for name, gradient in step["gradients"].items():
            assert_equal(gradient, expected["gradients"][name], name)


def reuse_own_keys(patch):
    original, rotate = ring._backward, ring.rotate

    def backward(*args):
        def rotate_own(pair, group):
            for source, _ in rotate(pair, group):
                yield source, pair

        ring.rotate = rotate_own
        try:
            return original(*args)
        finally:
            ring.rotate = rotate

    patch.setattr(ring, "_backward", backward)


@known_bug(
    "huggingface/diffusers#14265",
    "The backward pass of ring attention took the rank's own keys and values in every turn, while"
    " those of others went around unread.",
    reuse_own_keys,
    world=2,
)
def the_backward_pass_of_the_ring_takes_the_keys_of_each_rank():
    assert_first_step_as_alone(2, RING)


def keep_the_first_sums(patch):
    original = ring._forward

    def forward(*args):
        merge = torch.logaddexp
        try:
            torch.logaddexp = lambda before, other: before
            return original(*args)
        finally:
            torch.logaddexp = merge

    patch.setattr(ring, "_forward", forward)


@known_bug(
    "NVIDIA/Megatron-LM#1464",
    "Gradients of attention over several ranks were computed with the softmax sums of a part, and"
    " were off by more than their size.",
    keep_the_first_sums,
    world=2,
)
def gradients_of_the_ring_divide_by_the_sums_over_all_keys():
    assert_first_step_as_alone(2, RING)


def see_all_documents(patch):
    original = NextToken.arguments

    def arguments(self, batch):
        found = original(self, batch)
        is_shared = torch.distributed.is_initialized()
        return {**found, "document_ids": None} if is_shared else found

    patch.setattr(NextToken, "arguments", arguments)


@known_bug(
    "huggingface/trl#6843",
    "Context parallelism took every mask for a causal one, and packed documents attended to those"
    " before them.",
    see_all_documents,
    world=2,
)
def packed_documents_stay_apart_on_context_ranks():
    assert_first_step_as_alone(2, CONTEXT, data={"packing": "documents"})


WINDOWS = {
    "name": "gpt_oss",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 4,
    "window": 3,
    "moe": {"num_experts": 2, "experts_per_token": 2, "expert_ffn_dim": 8},
}


def see_the_whole_row(patch):
    original = GroupedQueryAttention.__init__

    def init(self, *args, window=None, **options):
        is_shared = torch.distributed.is_initialized()
        original(self, *args, window=None if is_shared else window, **options)

    patch.setattr(GroupedQueryAttention, "__init__", init)


@known_bug(
    "huggingface/accelerate#4177",
    "Layers that see a window of the row saw all of it once ranks shared sequences.",
    see_the_whole_row,
    world=2,
)
def windows_stay_narrow_on_context_ranks():
    assert_first_step_as_alone(2, CONTEXT, model=WINDOWS)
