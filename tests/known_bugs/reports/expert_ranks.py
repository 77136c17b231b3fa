"""Expert parallel: two ranks that divide the experts find what one process finds."""

from types import SimpleNamespace

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import (
    LATENT,
    MOE,
    assembled,
    assert_equal,
    assert_first_step_as_alone,
)
from trainer.engine.data.batch import IGNORED
from trainer.engine.parallel.expert import ScaledView
from trainer.engine.parallel.tensor import tensor
from trainer.engine.train import update
from trainer.engine.train.balance import Balance
from trainer.model_zoo.base import Model
from trainer.model_zoo.deepseek_v3.model import DeepSeekV3
from trainer.model_zoo.layers.router import Router

EXPERT = {"expert": 2, "shard": 2}
GPT_OSS = {
    "name": "gpt_oss",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 4,
    "moe": {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 8},
}


def scale_views(change):
    """Return what changes the factors with which ranks compute parameters of experts."""

    def put_in(patch):
        original = ScaledView.__init__

        def init(self, factor, gradient_factor, *others):
            original(self, *change(factor, gradient_factor), *others)

        patch.setattr(ScaledView, "__init__", init)

    return put_in


@known_bug(
    "pytorch/pytorch#160285",
    "Gradients of experts had already been summed over the ranks that sent them tokens, and were"
    " averaged over too few ranks: they were too large by the expert parallel degree.",
    scale_views(lambda factor, gradient: (factor, 1.0)),
    world=2,
)
def gradients_of_experts_do_not_grow_with_expert_ranks():
    assert_first_step_as_alone(2, EXPERT, model=MOE)


@known_bug(
    "NVIDIA/Megatron-LM#5956",
    "Gradients of experts were divided by the ranks of their own sharding group, into which"
    " tokens of more ranks had been sent.",
    scale_views(lambda factor, gradient: (factor, gradient * 2)),
    world=4,
)
def gradients_of_experts_are_divided_by_all_ranks_that_send_tokens():
    assert_first_step_as_alone(4, {"expert": 2, "shard": 4}, model=MOE)


@known_bug(
    "NVIDIA/Megatron-LM#7165",
    "The scale of expert gradients was that of dense parameters although experts are divided over"
    " other ranks.",
    scale_views(lambda factor, gradient: (factor, gradient / 2)),
    world=2,
)
def experts_divided_over_tensor_ranks_have_their_own_gradient_scale():
    assert_first_step_as_alone(2, {"expert": 2, "tensor": 2, "shard": 1}, model=MOE)


@known_bug(
    "pytorch/torchtitan#4245",
    "Every rank that holds a slice of an expert added the expert's whole bias, which multiplied"
    " it by the number of slices.",
    scale_views(lambda factor, gradient: (1.0, gradient)),
    world=2,
)
def slices_of_an_expert_add_its_bias_once():
    parallel = {"expert_tensor": 2, "shard": 2}
    assert_first_step_as_alone(2, parallel, model=GPT_OSS)


@known_bug(
    "pytorch/torchtitan#4332",
    "A bias was divided by the tensor degree for the forward pass, and its gradient with it.",
    scale_views(lambda factor, gradient: (factor, gradient * factor)),
    world=2,
)
def gradients_of_a_shared_bias_are_not_divided_with_it():
    parallel = {"expert_tensor": 2, "shard": 2}
    assert_first_step_as_alone(2, parallel, model=GPT_OSS)


def count_experts_as_replicas(patch):
    original = update.num_parts

    def num_parts(tensor):
        names = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None) or ()
        return original(tensor) // 2 if "expert" in names else original(tensor)

    patch.setattr(update, "num_parts", num_parts)


@known_bug(
    "NVIDIA/Megatron-LM#5916",
    "Some experts were left out of the gradient norm, so that gradients were clipped less than"
    " they should be.",
    count_experts_as_replicas,
    world=2,
)
def the_norm_counts_the_experts_of_all_ranks():
    assert_first_step_as_alone(2, EXPERT, model=MOE)


AUX = {**LATENT, "moe": {**LATENT["moe"], "aux_weight": 0.5, "z_weight": 0.1}}


def scale_router_losses_by_rows(patch):
    original = Balance.__init__

    def init(self, *args):
        original(self, *args)
        # As if no ranks shared a sequence.
        self._degrees = SimpleNamespace(data=self._degrees.data, sequence=1)

    patch.setattr(Balance, "__init__", init)


@known_bug(
    "NVIDIA/Megatron-LM#5047",
    "The losses of the router were scaled by the tokens of a rank, so that they weighed more the"
    " more tensor ranks shared a sequence.",
    scale_router_losses_by_rows,
    world=2,
)
def router_losses_weigh_the_same_on_tensor_ranks():
    assert_first_step_as_alone(2, {"tensor": 2, "shard": 1}, model=AUX)


@known_bug(
    "NVIDIA/Megatron-LM#3768",
    "The weight of the balancing loss changed with the context parallel degree.",
    scale_router_losses_by_rows,
    world=2,
)
def router_losses_weigh_the_same_on_context_ranks():
    assert_first_step_as_alone(2, {"context": 2, "shard": 1}, model=AUX)


def balance_the_tokens_of_a_rank(patch):
    patch.setattr(tensor, "_count_over_ranks", lambda count, chosen, group: count(chosen))


@known_bug(
    "NVIDIA/Megatron-LM#5996",
    "The balancing loss of a sequence was computed from the part of it that a tensor rank held.",
    balance_the_tokens_of_a_rank,
    world=2,
)
def a_sequence_is_balanced_over_the_ranks_that_share_it():
    assert_first_step_as_alone(2, {"tensor": 2, "shard": 1}, model=AUX)


BALANCED = {**LATENT, "moe": {**LATENT["moe"], "balance_bias": True, "bias_rate": 0.01}}


def count_the_tokens_of_a_rank(patch):
    original = Balance.collect
    patch.setattr(Balance, "collect", lambda self, _: original(self, lambda loads: None))


@known_bug(
    "pytorch/torchtitan#4154",
    "The loads that move the biases of a router were not summed over the tensor ranks, which see"
    " a part of the sequence each.",
    count_the_tokens_of_a_rank,
    world=2,
)
def tensor_ranks_move_the_biases_of_routers_by_the_loads_of_all():
    changes = {"model": BALANCED}
    expected = alone(loads_of_step, changes)
    for found in on_ranks(2, loads_of_step, {**changes, "parallel": {"tensor": 2, "shard": 1}}):
        assert_equal(found, expected)


def loads_of_step(changes):
    """Return the loads that the biases of a step's routers are moved by."""
    parts = assembled(**changes)
    parts.step.accumulate(next(parts.loader.steps(0)))
    return [load.tolist() for load in parts.step.balance.loads().values()]


FURTHER = {**LATENT, "mtp_depth": 1, "mtp_weight": 0.5}


def average_own_further_labels(patch):
    original = DeepSeekV3._further_targets

    def further_targets(self, tokens, labels, *others):
        for target in original(self, tokens, labels, *others):
            share = (labels != IGNORED).sum() / (target.labels != IGNORED).sum().clamp(min=1)
            yield target._replace(weight=target.weight * share)

    patch.setattr(DeepSeekV3, "_further_targets", further_targets)


@known_bug(
    "NVIDIA/Megatron-LM#7452",
    "The loss of multi-token prediction was normalised by each rank's own tokens, and unequal"
    " ranks weighed unequally.",
    average_own_further_labels,
    world=2,
)
def tokens_farther_ahead_weigh_the_same_on_all_ranks():
    assert_first_step_as_alone(2, {"shard": 2}, model=FURTHER, data={"micro_batch": 2})


def look_ahead_past_the_end(patch):
    def shift(x, count, fill, document_ids=None):
        return x.roll(-count, 1)

    patch.setattr(Model, "shift", staticmethod(shift))


@known_bug(
    "verl-project/verl#6475",
    "The tokens of a batch were rolled around to be its labels, so that the last position had the"
    " first token to predict.",
    look_ahead_past_the_end,
)
def nothing_is_predicted_past_the_end_of_a_row():
    parts = assembled(model=FURTHER, data={"packing": "concat"})
    (batch, *_) = next(parts.loader.steps(0))
    seen = []

    def loss(hidden, weight, labels, **options):
        seen.append(labels)
        return hidden.sum()

    parts.model(batch.tokens, labels=batch.labels, loss=loss)
    nearest, further = (labels.view(batch.labels.shape) for labels in seen)
    assert (nearest == batch.labels).all()
    assert (further[:, :-1] == batch.labels[:, 1:]).all()
    assert (further[:, -1] == IGNORED).all()


def multiply_by_data_ranks(patch):
    original = Router._balance_loss

    def balance_loss(self, *args):
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return original(self, *args) * world

    patch.setattr(Router, "_balance_loss", balance_loss)


@known_bug(
    "huggingface/transformers#48706",
    "A loss over the labels of all ranks was multiplied by their number against DDP's average, and"
    " the balancing loss, which was a mean already, with it.",
    multiply_by_data_ranks,
    world=2,
)
def router_losses_weigh_the_same_on_data_ranks():
    assert_first_step_as_alone(2, {"replicate": 2, "shard": 1}, model=AUX)
