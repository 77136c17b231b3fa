"""gpt-oss and Llama 4 under every plan, in float64: losses, norms and weights of one process.

Weights are large, so that scores, sinks and biases count in what blocks compute.
"""

import pytest

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.float64 import in_float64
from tests.train.plans import BASE, assembled, by_one_process, recipe_with, train, whole

STEPS = 3
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "init_std": 0.3}
EXPERTS = {"num_experts": 4, "expert_ffn_dim": 16}
MODELS = {
    "gpt_oss": {**SIZES, "name": "gpt_oss", "window": 5, "moe": EXPERTS},
    "llama4": {
        **SIZES,
        "name": "llama4",
        "ffn_dim": 64,
        "chunk": 7,
        "nope_every": 2,
        "temperature_floor": 8,
        "moe": EXPERTS,
    },
}
DATA = {**BASE["data"], "micro_batch": 2}
RING = {"context": 2, "context_exchange": "ring"}
PLANS = {
    "replicate": (2, {"replicate": 2, "shard": 1}),
    "tensor": (2, {"tensor": 2}),
    "shared-heads": (4, {"tensor": 4}),
    "tensor-few-heads-each": (8, {"tensor": 2, "shard": 4}),
    "tensor-hybrid": (
        8,
        {"tensor": 2, "shard": 2, "replicate": 2, "fsdp": {"strategy": "hybrid_shard"}},
    ),
    "tensor-pipeline": (4, {"tensor": 2, "pipeline": 2}),
    "tensor-expert": (4, {"tensor": 2, "shard": 2, "expert": 2, "expert_tensor": 2}),
    "tensor-context": (4, {"tensor": 2, "context": 2}),
    "context": (2, {"context": 2}),
    "ring": (2, RING),
    "ring-4": (4, {**RING, "context": 4}),
    "ring-tensor": (4, {**RING, "tensor": 2}),
    "ring-pipeline-shard": (8, {**RING, "pipeline": 2, "shard": 2}),
    "ring-expert": (4, {**RING, "shard": 2, "expert": 2, "expert_tensor": 2}),
}
QUICK = {"gpt_oss": ["tensor-expert", "ring"], "llama4": ["tensor-pipeline", "context"]}
ALSO = {
    "gpt_oss": [
        "shared-heads",
        "tensor-few-heads-each",
        "tensor-pipeline",
        "ring-4",
        "ring-tensor",
        "ring-expert",
    ],
    "llama4": [
        "replicate",
        "ring",
        "tensor-hybrid",
        "tensor-expert",
        "tensor-context",
        "ring-4",
        "ring-pipeline-shard",
    ],
}


def cases(plans):
    return [(family, plan) for family in plans for plan in plans[family]]


def trained(recipe):
    """Return losses, gradient norms, and the weights that this rank has a part of."""
    with in_float64():
        parts = assembled(recipe)
        losses, norms = train(parts, STEPS)
        return losses, norms, whole(parts.model)


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained)


def assert_as_alone(alone, family, world, parallel, **changes):
    changes = {"model": MODELS[family], "data": {**DATA, "packing": "documents"}, **changes}
    losses, norms, weights = alone(**changes)
    found = {}
    for rank in run_ranks(world, trained, recipe_with(parallel=parallel, **changes), timeout=300):
        assert rank[0] == pytest.approx(losses, abs=1e-12)
        assert rank[1] == pytest.approx(norms, abs=1e-12)
        found |= rank[2]
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name] == pytest.approx(weight, abs=1e-12), name


@pytest.mark.parametrize(("family", "plan"), [*cases(QUICK), *also(*cases(ALSO))])
def test_losses_norms_and_weights_are_those_of_one_process(family, plan, alone):
    assert_as_alone(alone, family, *PLANS[plan])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "plan", "packing"),
    [("gpt_oss", "ring", "none"), ("llama4", "ring", "none"), ("llama4", "context", "concat")],
)
def test_rows_without_documents(family, plan, packing, alone):
    assert_as_alone(alone, family, *PLANS[plan], data={**DATA, "packing": packing})


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["tensor", "ring"])
def test_blocks_that_are_recomputed(plan, alone):
    assert_as_alone(alone, "gpt_oss", *PLANS[plan], memory={"recompute": "full"})


@pytest.mark.matrix
@pytest.mark.parametrize("place", [{}, {"tensor": 0}])
def test_biases_and_sinks_that_a_rule_places(place, alone):
    rules = [{"match": r".*attention\.(o\.bias|sinks|k\.bias)", "place": place}]
    assert_as_alone(alone, "gpt_oss", 4, {"tensor": 2, "shard": 2, "rules": rules})
