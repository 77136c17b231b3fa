"""Stages in which one use of the embedding leads to another equal one process in float64."""

import pytest

from tests.cases import also
from tests.cells.draw import Cell
from tests.cells.run import compare
from trainer.engine.check.workers import RankPool
from trainer.engine.recipe.checks.checks import check
from trainer.engine.recipe.schema import Recipe

MODEL = {
    "name": "deepseek_v3",
    "dim": 32,
    "n_layers": 4,
    "n_dense_layers": 3,
    "n_heads": 4,
    "ffn_dim": 32,
    "kv_lora_rank": 8,
    "rope_head_dim": 4,
    "nope_head_dim": 4,
    "value_head_dim": 4,
    "vocab_size": 320,
    "mtp_weight": 1.0,
    "moe": {"num_experts": 4, "expert_ffn_dim": 8, "aux_weight": 0.01, "aux_scope": "global"},
}
DEEP = {**MODEL, "mtp_depth": 2}
TIED = {**MODEL, "mtp_depth": 1, "tie_embeddings": True}
OFTEN = {"fsdp": {"reduce_every": "micro_batch"}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
SELECTIVE = {"memory": {"recompute": "selective"}}
CASES = {
    "deep": (2, DEEP, "ZBVZeroBubble", {}, {}),
    "tied": (2, TIED, "InterleavedZeroBubble", {}, {}),
    "tied in a V": (2, TIED, "ZBVZeroBubble", {}, {}),
    "deep, tied, sharded": (
        4,
        {**DEEP, "tie_embeddings": True},
        "DualPipeV",
        {"shard": 2, **OFTEN},
        {},
    ),
    "deep, interleaved, sharded": (4, DEEP, "InterleavedZeroBubble", {"shard": 2, **OFTEN}, {}),
    "tied, tensor": (4, TIED, "DualPipeV", {"tensor": 2}, {}),
    "tied, context": (4, TIED, "ZBVZeroBubble", {"context": 2}, {}),
    "deep, experts": (4, DEEP, "InterleavedZeroBubble", {"shard": 2, "expert": 2}, {}),
    "deep, compiled": (2, DEEP, "DualPipeV", {}, COMPILED),
    "tied, compiled": (2, TIED, "InterleavedZeroBubble", {}, COMPILED),
    "deep, recomputed": (2, DEEP, "InterleavedZeroBubble", {}, SELECTIVE),
    "tied, recomputed": (2, TIED, "ZBVZeroBubble", {}, SELECTIVE),
}


@pytest.mark.parametrize("name", also(*CASES))
def test_split_backward_passes_of_repeated_embeddings_equal_one_process(name):
    world, model, schedule, parallel, changes = CASES[name]
    tables = {
        "run": {"steps": 2, "name": "repeated"},
        "model": model,
        "data": {
            "seq_len": 16,
            "global_batch": 8,
            "micro_batch": 1,
            "packing": "documents",
            "sources": [{"name": "synthetic"}],
        },
        "parallel": {"shard": 1, "pipeline": 2, "pipelining": {"schedule": schedule}, **parallel},
        **changes,
    }
    recipe = Recipe.model_validate(tables)
    assert list(check(recipe, world)) == []
    with RankPool(300.0) as pool:
        assert compare(Cell(1, recipe, world, {}), pool) == ""
