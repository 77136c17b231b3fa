"""EMA-Nesterov against its recursion, under plans, and on resume."""

import shutil

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, recipe_with, whole
from tests.train.processes import finish, start, tensors, write_recipe
from trainer.engine.recipe.checks.checks import check
from trainer.engine.train.parts import Position

STEPS, DECAY, SCALE = 6, 0.8, 0.5
EMA = {"nesterov": {"scale": SCALE, "decay": DECAY, "start": 0.3, "end": 0.9}}
SCHEDULE = {"name": "linear"}
LIKE = {"run": {"steps": STEPS, "seed": 3}, "schedule": SCHEDULE, "ema": EMA}
LIKE |= {"data": BASE["data"] | {"micro_batch": 2}}


def follow(changes):
    """Return for each step the weights before it, those with gradients, and those after it."""
    parts, found = assembled(recipe_with(**changes)), []
    batches = parts.loader.steps(0)
    copy = lambda: {name: value.copy() for name, value in whole(parts.model).items()}  # noqa: E731
    for step in range(STEPS):
        before = copy()
        factor = parts.start_step(Position(step=step))
        ahead = copy()
        parts.step.accumulate(next(batches), factor)
        parts.step.update(factor)
        parts.finish_step(step + 1)
        parts.step.clear()
        found.append((before, ahead, copy(), factor))
    return found


def test_gradients_are_computed_along_the_mean_change():
    (steps,) = run_ranks(1, follow, LIKE)
    means = {name: np.zeros_like(value) for name, value in steps[0][0].items()}
    moved = []
    for step, (before, ahead, after, factor) in enumerate(steps):
        beta = SCALE * factor if 2 <= step < 5 else 0.0
        for name, mean in means.items():
            assert ahead[name] == pytest.approx(before[name] + beta * mean, abs=1e-7), name
            means[name] = DECAY * mean + (1 - DECAY) * (after[name] - before[name])
        moved.append(any(not np.array_equal(ahead[name], before[name]) for name in means))
    assert moved == [False, False, True, True, True, False]


@pytest.mark.parametrize(
    "plan",
    [
        {"parallel": {"shard": 2}},
        {"parallel": {"tensor": 2}},
        {"parallel": {"pipeline": 2}},
        {
            "parallel": {"shard": 2},
            "memory": {"optimizer_in_backward": True},
            "optimizer": BASE["optimizer"] | {"clip_norm": 0.0},
        },
    ],
    ids=["shard", "tensor", "pipeline", "in-backward"],
)
def test_plans_move_the_same_weights(plan):
    alone = LIKE | {"optimizer": plan.get("optimizer", BASE["optimizer"])}
    (expected,) = run_ranks(1, follow, alone)
    for rank in run_ranks(2, follow, LIKE | plan, timeout=120):
        for name, weight in rank[-1][2].items():
            assert weight == pytest.approx(expected[-1][2][name], abs=1e-5), name


def skip_a_step():
    parts = assembled(recipe_with(**LIKE))
    before = whole(parts.model)
    before = {name: value.copy() for name, value in before.items()}
    parts.lookahead.start(0, 1.0)
    parts.lookahead.finish(is_updated=True)
    for mean in parts.lookahead.state().values():
        mean.add_(1.0)
    parts.lookahead.start(3, 1.0)
    ahead = {name: value.copy() for name, value in whole(parts.model).items()}
    parts.lookahead.finish(is_updated=False)
    after = whole(parts.model)
    return all(np.array_equal(before[n], after[n]) for n in before), all(
        not np.array_equal(before[n], ahead[n]) for n in before
    )


def test_a_skipped_step_returns_to_the_old_weights():
    assert run_ranks(1, skip_a_step) == [(True, True)]


def test_a_resumed_run_looks_ahead_as_without_interruption(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=8)
    settings = ["ema.nesterov.scale=0.5", "ema.nesterov.start=0.1"]
    settings += ["checkpoint.interval=4", "checkpoint.keep=2"]
    assert finish(start(recipe, overrides=settings)) == [0]
    _, through = tensors(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/run/checkpoints/step-00000008")
    assert finish(start(recipe, 1, 1, settings)) == [0]
    _, resumed = tensors(tmp_path / "run")
    assert through.keys() == resumed.keys()
    assert any(name.startswith("lookahead.") for name in through)
    for name, value in through.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": {"name": "schedule_free"}}, "scale"),
        ({"precision": {"parameters": "bf16"}}, "scale"),
        ({"ema": {"nesterov": {"scale": 0.3, "start": 0.8}}}, "end"),
    ],
)
def test_what_does_not_fit_is_refused(changes, key):
    recipe = recipe_with(**(LIKE | changes))
    assert ("ema", "nesterov", key) in [path for path, _, _ in check(recipe)]
