"""Schedules change the momentum of the update, after and within the backward pass."""

import pytest

from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, recipe_with
from trainer.engine.train.parts import Position

DATA = BASE["data"] | {"micro_batch": 8}


def momenta(optimizer, schedule, memory):
    """Return the momentum of each parameter group that each of six steps uses."""
    recipe = recipe_with(
        run={"steps": 6}, data=DATA, optimizer=optimizer, schedule=schedule, memory=memory
    )
    parts, found = assembled(recipe), []
    batches = parts.loader.steps(0)
    used = []
    run_step = parts.step.weight_update.run_step

    def record():
        groups = parts.optimizer.param_groups
        used.append([group.get("momentum", group.get("betas", [0])[0]) for group in groups])
        run_step()

    parts.step.weight_update.run_step = record
    for step in range(6):
        position = Position(step=step)
        factor = parts.lr_factor(position)
        parts.step.set_momentum(parts.momentum(position))
        parts.step.accumulate(next(batches), factor)
        parts.step.update(factor)
        parts.step.clear()
        found.append(sorted({value for values in used for value in values}))
        used.clear()
    return found


GROUPS = [{"match": "*.norm.weight", "betas": [0.6, 0.9]}]
ADAMW = {"name": "adamw", "clip_norm": 0.0, "betas": [0.9, 0.95], "groups": GROUPS}
SGD = {"name": "sgd", "momentum": 0.9, "clip_norm": 0.0}
LINE = {"name": "constant", "momentum_min": 0.5}
LINE |= {"momentum_warmup_steps": 2, "momentum_cooldown_steps": 2}


@pytest.mark.parametrize("in_backward", [False, True])
def test_each_step_uses_the_momentum_of_the_schedule(in_backward):
    memory = {"optimizer_in_backward": in_backward}
    (found,) = run_ranks(1, momenta, ADAMW, LINE, memory)
    expected = [[0.5], [0.55, 0.7], [0.6, 0.9], [0.6, 0.9], [0.55, 0.7], [0.5]]
    for values, wanted in zip(found, expected, strict=True):
        assert values == pytest.approx(wanted)


def test_one_cycle_moves_the_momentum_against_the_rate():
    schedule = {"name": "torch.OneCycleLR", "pct_start": 0.5, "anneal_strategy": "linear"}
    (found,) = run_ranks(1, momenta, SGD, schedule, {})
    values = [value for (value,) in found]
    assert values[0] == pytest.approx(0.95)
    assert min(values) == pytest.approx(0.85)
    assert values.index(min(values)) == 2
