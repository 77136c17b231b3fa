"""gpt-oss and Llama 4 under the plans that their own layers could break."""

import pytest

from tests.cases import also
from tests.train.plans import BASE, assert_same_weights, by_one_process, weights

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
MODELS = {
    "gpt_oss": {**SIZES, "name": "gpt_oss", "window": 5, "moe": {"expert_ffn_dim": 16}},
    "llama4": {
        **SIZES,
        "name": "llama4",
        "ffn_dim": 64,
        "chunk": 7,
        "nope_every": 2,
        "temperature_floor": 8,
        "moe": {"num_experts": 4, "expert_ffn_dim": 16},
    },
}
DATA = {**BASE["data"], "micro_batch": 2, "packing": "documents"}
PLANS = {
    "replicate": ({"replicate": 2, "shard": 1}, {}),
    "shard": ({"shard": 2}, {"recompute": "full"}),
    "pipeline": ({"pipeline": 2}, {}),
    "context": ({"context": 2}, {}),
    "expert": ({"expert": 2}, {}),
    "divided": ({"expert_tensor": 2}, {"recompute": "full"}),
}
REFUSED = ("llama4", "context")
QUICK = [
    *(("gpt_oss", plan) for plan in ("shard", "context", "divided")),
    *(("llama4", plan) for plan in ("pipeline", "expert")),
]


@pytest.fixture(scope="module")
def alone():
    return by_one_process(weights)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        (family, plan) if (family, plan) in QUICK else also((family, plan))[0]
        for family in MODELS
        for plan in PLANS
        if (family, plan) != REFUSED
    ],
)
def test_every_weight_is_that_of_one_process(family, plan, alone):
    parallel, memory = PLANS[plan]
    assert_same_weights(2, alone, parallel=parallel, model=MODELS[family], data=DATA, memory=memory)
