"""Adapters beside experts train the same under every plan.

In float64: at the rates of tests, steps of fp32 turn a rounding into a difference of 1e-3 in a
gradient's norm within twenty steps, under any plan.
"""

import pytest

from tests.distributed import run_ranks
from tests.lora.test_plans import BASE as LORA
from tests.train.float64 import in_float64
from tests.train.moe_family import BALANCED, layers_of, moe_recipe
from tests.train.plans import assembled, by_one_process, recipe_with, train, whole
from trainer.engine.core.errors import RecipeError
from trainer.engine.lora.adapter_weights import merged_weights

STEPS = 5
FAMILIES = {
    "qwen3": {"name": "qwen3", "flavor": "moe_debug"},
    "deepseek_v3": {"name": "deepseek_v3", "n_kv_heads": None},
    "llama4": {"name": "llama4"},
    "gpt_oss": {"name": "gpt_oss", "ffn_dim": None},
    "mixtral": {"name": "mixtral", "ffn_dim": None},
}
TARGETS = {
    "attention": ["*.attention.[qkvo].weight"],
    "shared": ["*.mlp.shared.*.weight"],
    "experts": ["*.experts.*", "layers.0.attention.o.weight"],
    "one": ["layers.1.attention.o.weight"],  # no gradient reaches the experts of the first block
}
PLANS = {
    "expert": (2, {"expert": 2}),
    "expert-shard": (4, {"expert": 2}),
    "divided": (2, {"expert_tensor": 2}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "replicate": (2, {"replicate": 2, "shard": 1}),
    "expert-divided": (4, {"expert": 2, "expert_tensor": 2}),
    "divided-tensor-expert": (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
}
QUICK = {
    ("deepseek_v3", "shared", "expert-shard"),
}
ALL_MOE = {"qwen3", "mixtral", "gpt_oss"}
HAVE_SHARED = {"deepseek_v3", "llama4"}


def cases():
    for family in FAMILIES:
        for targets in TARGETS:
            for plan, (_, axes) in PLANS.items():
                if targets == "shared" and family not in HAVE_SHARED:
                    continue
                has_both = targets == "attention" or (targets == "experts" and family in ALL_MOE)
                if "pipeline" in axes and not has_both:  # a stage would train nothing
                    continue
                values = family, targets, plan
                yield pytest.param(*values, marks=() if values in QUICK else pytest.mark.matrix)


def lora_recipe(family, targets, **changes):
    sizes = {**LORA["model"], **FAMILIES[family]}
    model = {key: value for key, value in sizes.items() if value is not None}
    lora = {"rank": 3, "alpha": 12.0, "targets": TARGETS[targets]}
    data = {**LORA["data"], "packing": "documents"}
    return recipe_with(**{**LORA, "model": model, "lora": lora, "data": data, **changes})


def trained(recipe):
    """Return losses, gradient norms, and the weights that this rank has a part of, also merged."""
    with in_float64():
        parts = assembled(recipe)
        losses, norms = train(parts, STEPS)
        merged = {
            f"merged {name}": getattr(weight, "full_tensor", lambda weight=weight: weight)().numpy()
            for name, weight in merged_weights(parts.model).items()
        }
        return losses, norms, whole(parts.model) | merged


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, lambda of: lora_recipe(*of))


@pytest.mark.parametrize(("family", "targets", "plan"), cases())
def test_a_plan_trains_adapters_as_one_process_does(family, targets, plan, alone):
    world, parallel = PLANS[plan]
    losses, norms, weights = alone(of=(family, targets))
    found = {}
    for rank in run_ranks(world, trained, lora_recipe(family, targets, parallel=parallel)):
        assert rank[0] == pytest.approx(losses, abs=1e-12)
        assert rank[1] == pytest.approx(norms, abs=1e-12)
        found |= rank[2]
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        # Merged in fp32.
        near = 1e-6 if name.startswith("merged") else 1e-12
        assert found[name] == pytest.approx(weight, abs=near), name


def test_a_stage_of_a_pipeline_without_adapters_is_refused():
    recipe = lora_recipe("qwen3", "one", parallel={"pipeline": 2})
    assert (
        run_ranks(2, refusal, recipe)
        == ["rank 0 of the pipeline would train nothing: its blocks have no adapter"] * 2
    )


def refusal(recipe):
    with pytest.raises(RecipeError) as error:
        assembled(recipe)
    (problem,) = error.value.problems
    assert problem.key == "lora.targets"
    return problem.message


def test_biases_of_frozen_routers_stay_and_loads_are_counted():
    for biases, measures in run_ranks(1, frozen):
        assert not any(map(any, biases))
        assert measures["max_violation"] > 0
        assert 0 < measures["router_entropy"] < 2.08  # ln(8)


def frozen():
    """Return the biases of routers after steps in which adapters train, and what was measured."""
    parts = assembled(moe_recipe(BALANCED, lora={"rank": 3, "targets": TARGETS["one"]}))
    train(parts, STEPS)
    biases = [layer.router.bias.tolist() for layer in layers_of(parts)]
    return biases, {name: value.item() for name, value in parts.step.balance.metrics().items()}
