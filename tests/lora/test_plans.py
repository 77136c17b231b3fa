"""Adapters train the same under every plan."""

import os
from functools import cache

import pytest
import torch

from tests.cases import quick
from tests.distributed import run_ranks
from trainer.engine.assemble.assemble import assemble
from trainer.engine.launch.environment import World
from trainer.engine.lora.adapter_weights import merged_weights
from trainer.engine.recipe.schema import Recipe

STEPS = 3
BASE = {
    "run": {"steps": STEPS, "seed": 3},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}
    | {"init_std": 0.1},
    "data": {
        "seq_len": 32,
        "global_batch": 8,
        "micro_batch": 2,
        "sources": [{"name": "synthetic", "num_documents": 100, "document_tokens": 20}],
    },
    "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9, "clip_norm": 0.5},
    "schedule": {"name": "constant"},
    "precision": {"compute": "fp32"},
    "lora": {"rank": 3, "alpha": 12.0},
}


def curves(changes):
    """Return losses, gradient norms, and the merged weights at the end."""
    recipe = Recipe.model_validate(BASE | changes)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    parts = assemble(recipe, world, torch.device("cpu"))
    assert len(parts.optimizer.state) == 0
    batches = parts.loader.steps(0)
    losses, norms = [], []
    for _ in range(STEPS):
        gradients = parts.step.accumulate(next(batches))
        assert all(w.grad is None for w in parts.model.parameters() if not w.requires_grad)
        parts.step.update(1.0)
        parts.step.clear()
        losses.append(gradients.loss.item())
        norms.append(gradients.norm.item())
    assert all(weight.requires_grad for weight in parts.optimizer.state)
    whole = {
        name: getattr(weight, "full_tensor", lambda weight=weight: weight)().numpy()
        for name, weight in merged_weights(parts.model).items()
    }
    return losses, norms, whole


PLANS = {
    "replicate-2": (2, {"parallel": {"replicate": 2, "shard": 1}}),
    "shard-2": (2, {"parallel": {"shard": 2}}),
    "offload-2": (2, {"parallel": {"fsdp": {"offload": True}}}),
    "shard-2 recomputed": (2, {"parallel": {"shard": 2}, "memory": {"recompute": "full"}}),
    "replicate-2 recomputed": (
        2,
        {"parallel": {"replicate": 2, "shard": 1}, "memory": {"recompute": "full"}},
    ),
    "hybrid-2x2": (
        4,
        {"parallel": {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}},
    ),
    "tensor-2": (2, {"parallel": {"tensor": 2}}),
    "tensor-2 compiled": (
        2,
        {"parallel": {"tensor": 2}, "compile": {"enabled": True, "backend": "aot_eager"}},
    ),
    "tensor-4, shared heads": (4, {"parallel": {"tensor": 4}}),
    "tensor-2-shard-2": (4, {"parallel": {"tensor": 2, "shard": 2}}),
    "pipeline-2": (2, {"parallel": {"pipeline": 2}}),
    "pipeline-2, split backward": (
        2,
        {"parallel": {"pipeline": 2, "pipelining": {"schedule": "ZBVZeroBubble"}}}
        | {"model": BASE["model"] | {"n_layers": 4}},
    ),
    "pipeline-2-tensor-2": (4, {"parallel": {"pipeline": 2, "tensor": 2}}),
    "tensor-2-shard-2, by rules": (
        4,
        {
            "parallel": {
                "tensor": 2,
                "shard": 2,
                "rules": [
                    {"match": r".*\.up\.(weight|lora_b)", "place": {}},
                    {"match": r".*\.down\.(weight|lora_a)", "place": {"shard": 1}},
                    {"match": r".*\.q\.weight", "place": {"tensor": 1, "shard": 1}},
                ],
            }
        },
    ),
}


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, curves, {})[0]


@cache
def alone_with(text):
    return run_ranks(1, curves, eval(text))[0]


@cache
def run_start():
    """Return the merged weights before the first step."""
    recipe = Recipe.model_validate(BASE)
    weights = merged_weights(assemble(recipe, World(), torch.device("cpu")).model)
    return {name: weight.numpy() for name, weight in weights.items()}


def assert_same(result, expected):
    """Compare curves, and the merged weights that a rank has a part of."""
    assert result[0] == pytest.approx(expected[0], abs=1e-5)
    assert result[1] == pytest.approx(expected[1], abs=1e-5)
    assert result[2]
    for name, weight in result[2].items():
        assert weight == pytest.approx(expected[2][name], abs=1e-5), name


@pytest.mark.parametrize(
    "plan",
    quick(PLANS, "hybrid-2x2", "pipeline-2, split backward"),
)
def test_a_plan_gives_the_curves_and_the_merged_weights_of_one_process(plan):
    world, changes = PLANS[plan]
    alone = alone_with(repr({"model": changes.get("model", BASE["model"])}))
    start = run_start()["layers.1.mlp.down.weight"]
    assert abs(alone[2]["layers.1.mlp.down.weight"] - start).max() > 1e-2, "adapters learn"
    found = set()
    for result in run_ranks(world, curves, changes, timeout=240):
        assert_same(result, alone)
        found |= result[2].keys()
    assert found == alone[2].keys()


@pytest.mark.matrix
def test_recomputed_and_compiled_blocks_do_not_change_the_curves(alone):
    assert_same(run_ranks(1, curves, {"memory": {"recompute": "full"}})[0], alone)
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    assert_same(run_ranks(1, curves, compiled, timeout=120)[0], alone)


@pytest.mark.slow
def test_sharded_adapters_of_the_last_block_and_bf16():
    """Units without anything to train, and the low precision of the products."""
    changes = {"lora": {"rank": 2, "targets": ["layers.1.mlp.down.weight"]}}
    expected = run_ranks(1, curves, changes)[0]
    for result in run_ranks(2, curves, changes | {"parallel": {"shard": 2}}):
        assert_same(result, expected)
    low = changes | {"precision": {"compute": "bf16"}}
    for result in run_ranks(2, curves, low | {"parallel": {"shard": 2}}):
        assert result[0] == pytest.approx(expected[0], rel=2e-2)
