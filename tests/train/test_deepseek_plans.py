"""DeepSeek-V3 under the plans that its own layers could break."""

import pytest

from tests.cases import also
from tests.train.plans import BASE, assert_same_weights, by_one_process, weights

SIZES = {
    "name": "deepseek_v3",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "ffn_dim": 64,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "nope_head_dim": 12,
    "rope_head_dim": 4,
    "value_head_dim": 10,
    "rope_scaling": {"factor": 4.0, "original_max_seq_len": 8, "mscale_all_dim": 1.0},
    "moe": {"num_experts": 6, "expert_ffn_dim": 16, "groups": 3, "groups_per_token": 2},
}
DATA = BASE["data"] | {"packing": "documents"}


@pytest.fixture(scope="module")
def alone():
    return by_one_process(weights)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2, "shard": 2},
        *also(
            {"context": 2, "context_exchange": "ring", "pipeline": 2},
            {"tensor": 2, "pipeline": 2},
            {"context": 2, "shard": 2},
        ),
    ],
)
def test_latent_attention_is_shared_by_ranks(parallel, alone):
    model = {**SIZES, "n_dense_layers": 2}
    assert_same_weights(4, alone, parallel=parallel, model=model, data=DATA)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "parallel",
    [
        {"shard": 2, "fsdp": {"strategy": "shard_grad_op"}},
        {"replicate": 2, "shard": 1},
        {"shard": 2},
    ],
)
def test_experts_and_predictions_farther_ahead_are_shared_by_ranks(parallel, alone):
    model, data = {**SIZES, "mtp_depth": 2}, {**DATA, "micro_batch": 2}
    memory = {"recompute": "full"}
    assert_same_weights(2, alone, parallel=parallel, model=model, data=data, memory=memory)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2, "context": 2},
        *also(
            {"tensor": 2, "context": 2},
            {"tensor": 2, "pipeline": 2},
            {"tensor": 2, "expert": 2, "shard": 2},
            {"context": 2, "context_exchange": "ring", "shard": 2},
            {"pipeline": 2, "shard": 2, "pipelining": {"schedule": "ZBVZeroBubble"}},
        ),
    ],
)
def test_predictions_farther_ahead_need_tokens_of_other_ranks(parallel, alone):
    model = {**SIZES, "n_layers": 4, "n_dense_layers": 3, "mtp_depth": 2, "mtp_weight": 1.0}
    assert_same_weights(4, alone, parallel=parallel, model=model, data=DATA)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "parallel", [{"pipeline": 2, "context": 2}, {"tensor": 2, "expert": 2, "shard": 2}]
)
@pytest.mark.parametrize("packing", ["concat", "none"])
def test_predictions_farther_ahead_in_other_rows(packing, parallel):
    model = {**SIZES, "n_layers": 4, "n_dense_layers": 3, "mtp_depth": 2, "mtp_weight": 1.0}
    data = {**DATA, "packing": packing}
    assert_same_weights(4, by_one_process(weights), parallel=parallel, model=model, data=data)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "parallel",
    [{"pipeline": 2, "shard": 2}, {"tensor": 2, "shard": 2}, {"tensor": 2, "expert": 2}],
)
def test_experts_are_in_stages_and_beside_split_attention(parallel, alone):
    assert_same_weights(4, alone, parallel=parallel, model=SIZES, data=DATA)
