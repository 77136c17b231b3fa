"""Experts and routers in one process, against the definitions."""

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.runs import LATENT, assembled, assert_equal
from tests.model_zoo.moe_reference import by_tokens, layer, tokens
from trainer.engine.train.balance import Balance
from trainer.engine.train.step import TrainStep
from trainer.kernels.choose import choose
from trainer.kernels.moe.aux_loss import add_aux_loss
from trainer.model_zoo.gpt_oss.config import GptOssConfig
from trainer.model_zoo.gpt_oss.model import ClampedExperts, ClampedMoE
from trainer.model_zoo.layers import moe as moe_layer
from trainer.model_zoo.layers.moe import moe_layers
from trainer.model_zoo.layers.router import Router

BALANCED = {
    **LATENT,
    "n_dense_layers": 0,
    "moe": {**LATENT["moe"], "balance_bias": True, "bias_rate": 0.01},
}


def biases_and_loads(**changes):
    """Return each layer's bias after a step, and its load of the step."""
    parts = assembled(model=BALANCED, **changes)
    parts.step.accumulate(next(parts.loader.steps(0)))
    loads = parts.step.balance._loads[:, : BALANCED["moe"]["num_experts"]].clone()
    parts.step.update(1.0)
    return [layer.router.bias for layer in moe_layers(parts.model).values()], loads, parts


def count_choices(parts):
    """Count the experts that the tokens of the first step choose, without padding."""
    counts = []
    hooks = [
        layer.router.register_forward_hook(lambda module, args, out: counts.append(out.chosen))
        for layer in moe_layers(parts.model).values()
    ]
    fresh = next(parts.loader.steps(0))
    found = [torch.zeros(BALANCED["moe"]["num_experts"] + 1) for _ in hooks]
    for batch in fresh:
        counts.clear()
        parts.model(batch.tokens, padding_mask=batch.padding_mask)
        for number, chosen in enumerate(counts):
            found[number] += chosen.flatten().bincount(minlength=len(found[number]))
    return torch.stack(found)[:, :-1]


def assert_one_update_by_the_loads(**changes):
    biases, loads, _ = biases_and_loads(**changes)
    expected = count_choices(assembled(model=BALANCED))
    assert_equal(loads, expected, "loads")
    for bias, load in zip(biases, expected, strict=True):
        assert_equal(bias, 0.01 * (load.mean() - load).sign(), "bias")


def update_biases_in_each_micro_batch(patch):
    original = TrainStep._forward_backward

    def forward_backward(self, batches, factor, before_update):
        pieces = []
        for batch in batches:
            pieces.append(original(self, [batch], factor, before_update))
            self.balance.collect(lambda loads: None)
            self.balance.update()
        return torch.stack(pieces).sum(0)

    patch.setattr(TrainStep, "_forward_backward", forward_backward)


@known_bug(
    "pytorch/torchtitan#1304",
    "The biases that balance experts were moved in each micro batch instead of once a step.",
    update_biases_in_each_micro_batch,
)
def biases_of_experts_move_once_a_step():
    assert_one_update_by_the_loads()


def count_in_the_forward_pass(patch):
    def add(x, loss, factor, counter, load):
        counter.data.add_(load)
        return add_aux_loss(x, loss, factor, counter, torch.zeros_like(load))

    patch.setattr(moe_layer, "add_aux_loss", add)


@known_bug(
    "pytorch/torchtitan#1593",
    "Tokens of each expert were counted in the forward pass, which recomputation runs twice.",
    count_in_the_forward_pass,
)
def recomputation_does_not_count_tokens_twice():
    assert_one_update_by_the_loads(memory={"recompute": "full"})


def stop_at_a_layer_without_bias(patch):
    original = Balance.update

    def update(self, is_bad=None):
        if next(self._layers[0].router.parameters()).requires_grad:
            original(self, is_bad)

    patch.setattr(Balance, "update", update)


@known_bug(
    "pytorch/torchtitan#3686",
    "A layer whose experts are not balanced ended the update of all layers behind it.",
    stop_at_a_layer_without_bias,
)
def a_frozen_router_does_not_stop_the_others():
    parts = assembled(model=BALANCED, run={"seed": 7})  # the second layer is out of balance
    first, second = moe_layers(parts.model).values()
    first.router.weight.requires_grad_(False)
    parts.step.accumulate(next(parts.loader.steps(0)))
    parts.step.update(1.0)
    assert first.router.bias.abs().max() == 0
    assert second.router.bias.abs().max() > 0


def count_filler(patch):
    original = Router.forward

    def forward(self, x, token_weights=None, token_factor=None):
        return original(self, x)

    patch.setattr(Router, "forward", forward)


@known_bug(
    "huggingface/transformers#28505",
    "Filler was routed and counted like tokens, so that the balancing loss evened out the experts"
    " of padding.",
    count_filler,
)
def filler_takes_no_expert():
    parts = assembled(model=BALANCED)
    batches = next(parts.loader.steps(0))
    parts.step.accumulate(batches)
    loads = parts.step.balance._loads[:, : BALANCED["moe"]["num_experts"]]
    real = sum((~batch.padding_mask).sum() for batch in batches)
    assert real < sum(batch.tokens.numel() for batch in batches)
    assert_equal(loads.sum(1), [2.0 * real] * len(loads))


GROUPS = {
    "num_experts": 12,
    "experts_per_token": 4,
    "groups": 4,
    "groups_per_token": 2,
    "score": "sigmoid",
    "balance_bias": True,
}


def zero_instead_of_infinity(patch):
    original = Router._within_groups

    def within_groups(self, scores):
        found = original(self, scores)
        return found.masked_fill(found == -torch.inf, 0)

    patch.setattr(Router, "_within_groups", within_groups)


@known_bug(
    "deepseek-ai/DeepSeek-V3#741",
    "Groups that a token may not take were given the score 0, which wins over the negative scores"
    " that a bias makes.",
    zero_instead_of_infinity,
)
def experts_of_other_groups_are_out_of_reach_of_negative_scores():
    moe, x = layer(**GROUPS), tokens()
    moe.router.bias.copy_(torch.linspace(-3, -2, 12))
    chosen = moe.router(x).chosen
    assert (chosen // 3).sort(1).values.diff(dim=1).ne(0).sum(1).le(1).all()
    torch.testing.assert_close(moe(x), by_tokens(moe, x)[0])


def weigh_by_biased_scores(patch):
    original = Router._scores

    def scores(self, logits):
        scores_TE, shares_TE = original(self, logits)
        return scores_TE + self.bias, shares_TE

    patch.setattr(Router, "_scores", scores)


@known_bug(
    "huggingface/transformers#39581",
    "The bias that only chooses experts took part in the weights of their outputs.",
    weigh_by_biased_scores,
)
def biases_choose_experts_and_do_not_weigh_them():
    moe, x = layer(**{**GROUPS, "groups": 1, "groups_per_token": 1}), tokens()
    moe.router.bias.copy_(torch.linspace(0.2, -0.2, 12))
    torch.testing.assert_close(moe(x), by_tokens(moe, x)[0])


def add_the_bias_unweighted(patch):
    def compute(self, rows, weight, offs):
        return original(self, rows, weight, offs) + self.down_bias[0] * (1 - weight.unsqueeze(1))

    original = ClampedExperts.compute
    patch.setattr(ClampedExperts, "compute", compute)


@known_bug(
    "NVIDIA-NeMo/Automodel#2591",
    "The bias of an expert's last product was added in full for each chosen expert, not times the"
    " router's weight.",
    add_the_bias_unweighted,
)
def biases_of_experts_are_weighted_by_the_router():
    sizes = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 8}
    config = GptOssConfig(dim=16, n_heads=2, n_kv_heads=1, moe=sizes)
    moe = ClampedMoE(config, choose({}, "cpu", 8))
    torch.nn.init.normal_(moe.experts.gate_up)
    torch.nn.init.zeros_(moe.experts.down)
    torch.nn.init.constant_(moe.experts.down_bias, 0.5)
    # Weights of a token's experts add up to 1, and all experts add the same.
    assert_equal(moe(torch.randn(2, 5, 16)).detach(), torch.full((2, 5, 16), 0.5))


def fill_in_bf16(patch):
    original = Router._fill
    patch.setattr(Router, "_fill", lambda self, *args: original(self, *args).bfloat16())


@known_bug(
    "NVIDIA/Megatron-LM#1482",
    "The bias that balances experts was cast to bf16 with the model, where most of its small"
    " steps are lost.",
    fill_in_bf16,
)
def biases_of_experts_keep_small_steps_under_bf16():
    parts = assembled(model=BALANCED, precision={"compute": "bf16"})
    routers = [each.router for each in moe_layers(parts.model).values()]
    for router in routers:
        router.bias.fill_(0.5)
    parts.step.balance._loads[:, 0] = 8
    for _ in range(10):
        parts.step.balance.update()
    for router in routers:
        assert_equal(router.bias, [0.4, 0.6, 0.6, 0.6])


def route_in_bf16(patch):
    def logits(self, x):
        weight = self.local("weight").to(torch.bfloat16)
        return torch.nn.functional.linear(x.to(torch.bfloat16), weight).float()

    patch.setattr(Router, "logits", logits)


@known_bug(
    "NousResearch/torchtitan#38",
    "Scores of the router were cast back to the dtype of activations, where many of them are"
    " equal.",
    route_in_bf16,
)
def the_router_computes_in_fp32_under_bf16():
    moe, x = layer(torch.float32, num_experts=8), tokens(dtype=torch.bfloat16)
    exact = torch.nn.functional.linear(x.flatten(0, 1).double(), moe.router.weight.double())
    assert_equal(moe.router.logits(x.flatten(0, 1)).detach(), exact.detach())


def divide_the_score_by_itself(patch):
    original = Router.__init__

    def init(self, dim, settings):
        original(self, dim, settings.model_copy(update={"normalize": True}))

    patch.setattr(Router, "__init__", init)


@known_bug(
    "NVIDIA/Megatron-LM#894",
    "With one expert a token its weight was a softmax over one score, which is always one, and the"
    " router learned nothing from the loss.",
    divide_the_score_by_itself,
)
def the_router_of_one_expert_a_token_learns():
    moe = layer(experts_per_token=1, normalize=False)
    moe(tokens()).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-6
