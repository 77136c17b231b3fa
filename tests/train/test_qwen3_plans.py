"""Qwen3 under the plans that its own layers could break: norms of heads that ranks share."""

import pytest

from tests.cases import also
from tests.train.plans import BASE, assert_same_weights, by_one_process, weights

MODEL = {**BASE["model"], "name": "qwen3", "head_dim": 16}


@pytest.fixture(scope="module")
def alone():
    return by_one_process(weights)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 4},  # two key-value heads
        *also({"tensor": 2, "shard": 2}, {"context": 2, "pipeline": 2}),
    ],
)
def test_every_weight_is_that_of_one_process(parallel, alone):
    data = BASE["data"] | {"packing": "documents", "micro_batch": 4}
    assert_same_weights(4, alone, parallel=parallel, model=MODEL, data=data)


@pytest.mark.parametrize("parallel", [{"pipeline": 2, "shard": 2}, *also({"shard": 4})])
def test_every_weight_of_experts_is_that_of_one_process(parallel, alone):
    experts = {"expert_ffn_dim": 24, "aux_weight": 1e-2, "aux_scope": "global"}
    model = {**MODEL, "flavor": "moe_debug", "moe": experts}
    assert_same_weights(4, alone, parallel=parallel, model=model)
