"""Every data parallel plan gives the losses and gradient norms of one process."""

import os

import pytest
import torch

from tests.distributed import run_ranks
from trainer.engine.assemble import assemble
from trainer.engine.launch.environment import World
from trainer.engine.recipe.schema import Recipe
from trainer.engine.train.evaluate import evaluate

STEPS = 20
BASE = {
    "run": {"steps": STEPS, "seed": 3},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
    "data": {
        "seq_len": 32,
        "global_batch": 8,
        "micro_batch": 1,
        "sources": [{"name": "synthetic", "num_documents": 300, "document_tokens": 20}],
        "validation_fraction": 0.1,
    },
    # SGD shows a wrong gradient scale, which AdamW hides.
    "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.5},
    "schedule": {"name": "constant"},
    "precision": {"compute": "fp32"},
    "evaluate": {"steps": 3},
}


def recipe_with(**changes):
    return Recipe.model_validate(BASE | changes)


def curves(recipe):
    """Return losses, gradient norms and the final validation loss, as every rank sees them."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    parts = assemble(recipe, world, torch.device("cpu"))
    losses, norms = [], []
    batches = parts.loader.steps(0)
    for step in range(STEPS):
        gradients = parts.step.accumulate(next(batches))
        parts.step.update(recipe.schedule.factor(step, STEPS))
        parts.step.clear()
        losses.append((gradients.loss / gradients.tokens).item())
        norms.append(gradients.norm.item())
    validation = evaluate(
        parts.model, parts.validation, parts.step.loss, parts.device, parts.degrees.data
    )
    return losses, norms, validation


PLANS = {
    "replicate-2": (2, {"replicate": 2, "shard": 1}),
    "shard-2": (2, {"shard": 2}),
    "no_shard-2": (2, {"fsdp": {"strategy": "no_shard"}}),
    "shard_grad_op-2": (2, {"fsdp": {"strategy": "shard_grad_op"}}),
    "offload-2": (2, {"fsdp": {"offload": True}}),
    "replicate-4": (4, {"replicate": -1, "shard": 1}),
    "shard-4": (4, {"shard": -1}),
    "hybrid-2x2": (4, {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}),
    "hybrid-zero2-2x2": (
        4,
        {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard_zero2"}},
    ),
}


@pytest.fixture(scope="module")
def alone():
    known = {}

    def compute(**changes):
        key = repr(changes)
        if key not in known:
            known[key] = run_ranks(1, curves, recipe_with(**changes))[0]
        return known[key]

    return compute


def assert_same(world, alone, **changes):
    expected = alone(**{table: values for table, values in changes.items() if table != "parallel"})
    for result in run_ranks(world, curves, recipe_with(**changes), timeout=120):
        for got, wanted in zip(result, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("plan", list(PLANS))
def test_plan_gives_the_curves_of_one_process(plan, alone):
    world, parallel = PLANS[plan]
    assert_same(world, alone, parallel=parallel, data=BASE["data"] | {"packing": "documents"})


@pytest.mark.parametrize("packing", ["concat", "none"])
@pytest.mark.parametrize("plan", ["replicate-2", "shard-4", "hybrid-2x2"])
def test_every_packing_mode_under_plans(plan, packing, alone):
    world, parallel = PLANS[plan]
    assert_same(world, alone, parallel=parallel, data=BASE["data"] | {"packing": packing})


@pytest.mark.parametrize("plan", ["replicate-2", "shard-2"])
def test_adamw_and_tied_embeddings_under_plans(plan, alone):
    world, parallel = PLANS[plan]
    assert_same(
        world,
        alone,
        parallel=parallel,
        model=BASE["model"] | {"tie_embeddings": True},
        optimizer={"name": "adamw", "lr": 3e-3},
    )


@pytest.mark.parametrize("micro_batch", [2, 3, 8])
def test_accumulation_does_not_change_the_curves(micro_batch, alone):
    """Rows hold unequal numbers of valid tokens: a mean of means would differ."""
    data = BASE["data"] | {"packing": "none"}
    expected = alone(data=data)
    result = run_ranks(1, curves, recipe_with(data=data | {"micro_batch": micro_batch}))[0]
    for got, wanted in zip(result, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)


def test_recomputation_and_compiled_blocks_do_not_change_the_curves(alone):
    expected = alone()
    changed = recipe_with(memory={"recompute": "full"})
    assert run_ranks(1, curves, changed)[0] == expected
    compiled = recipe_with(compile={"enabled": True, "backend": "aot_eager"})
    for got, wanted in zip(run_ranks(1, curves, compiled)[0], expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)
