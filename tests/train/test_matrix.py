"""Every way to split a model trains it as one process does: `make test-all`.

Losses, gradient norms, and in the end all weights and all of the optimizer's state.
"""

from itertools import combinations
from typing import get_args

import pytest
import torch

from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, by_one_process, recipe_with, train, whole
from trainer.engine.parallel.tables import FSDP, Memory, Pipelining
from trainer.engine.recipe.checks.checks import check

pytestmark = pytest.mark.matrix

TOLERANCE = 1e-5
AXES = ("replicate", "shard", "context", "tensor", "pipeline")
OPTIMIZERS = {
    "sgd": BASE["optimizer"],
    # Where a gradient is rounding alone, a small epsilon makes a step of full length of it.
    "adamw": {"name": "adamw", "lr": 3e-3, "eps": 1e-4, "clip_norm": 0.5},
}
COMMON = {
    "run": {"name": "matrix", "steps": 20, "seed": 3},
    "data": BASE["data"] | {"packing": "documents"},
}
COMBINATIONS = [
    *(axes for count in (1, 2, 3) for axes in combinations(AXES, count)),
    ("pipeline", "shard", "context", "tensor"),
]


def recipes(**changes):
    """Return a recipe for each optimizer; sequences are exchanged in another way under each."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        parallel = dict(changes.get("parallel", {}))
        if parallel.get("context", 1) > 1 and name == "adamw":
            parallel["context_exchange"] = "ring"
        given = {**changes, "parallel": parallel} if parallel else changes
        found[name] = recipe_with(**COMMON, **given, optimizer=optimizer)
    return found


def trained(recipes):
    """Return losses, norms, and the state that this rank has a part of, for each recipe."""
    found = {}
    for name, recipe in recipes.items():
        parts = assembled(recipe)
        curves = train(parts, recipe.run.steps)
        state = whole(parts.model)
        for key, weight in parts.model.named_parameters():
            for part, value in parts.optimizer.state[weight].items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                state[f"{key}.{part}"] = torch.as_tensor(full).numpy()
        found[name] = (*curves, state)
    return found


@pytest.fixture(scope="module")
def alone():
    """Return a function from changes of the recipe to what one process makes of it."""
    return by_one_process(trained, recipes)


def assert_same(world, alone, parallel, **changes):
    wanted = alone(**changes)
    found = run_ranks(world, trained, recipes(parallel=parallel, **changes), timeout=290)
    for name, (losses, norms, state) in wanted.items():
        together = {}
        for rank in found:
            assert rank[name][0] == pytest.approx(losses, abs=TOLERANCE, rel=TOLERANCE)
            assert rank[name][1] == pytest.approx(norms, abs=TOLERANCE, rel=TOLERANCE)
            together |= rank[name][2]
        assert together.keys() == state.keys()
        for key, value in state.items():
            difference = abs(together[key] - value).max() / max(abs(value).max(), 1e-3)
            assert difference <= TOLERANCE, f"{name}: {key}: {difference:.1e}"


def degrees(*axes):
    return {"shard": 1, **dict.fromkeys(axes, 2)}


@pytest.mark.parametrize("axes", COMBINATIONS, ids="-".join)
def test_combinations_of_axes(axes, alone):
    assert_same(2 ** len(axes), alone, degrees(*axes))


@pytest.mark.parametrize("schedule", get_args(Pipelining.model_fields["schedule"].annotation))
def test_schedules(schedule, alone):
    parallel = {**degrees("pipeline", "shard"), "pipelining": {"schedule": schedule}}
    assert_same(4, alone, parallel, model=BASE["model"] | {"n_layers": 5})


@pytest.mark.parametrize("axes", [("replicate", "shard"), ("replicate", "context", "tensor")])
@pytest.mark.parametrize("strategy", get_args(FSDP.model_fields["strategy"].annotation))
def test_strategies(strategy, axes, alone):
    parallel = {**degrees(*axes), "fsdp": {"strategy": strategy}}
    assert_same(2 ** len(axes), alone, parallel)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("mode", get_args(Memory.model_fields["recompute"].annotation))
def test_recomputation(mode, axis, alone):
    memory = {"recompute": mode}
    refused = check(recipe_with(**COMMON, parallel=degrees(axis), memory=memory), 2)
    if refused:
        pytest.skip(f"refused: {refused[0][1]}")
    assert_same(2, alone, degrees(axis), memory=memory)
