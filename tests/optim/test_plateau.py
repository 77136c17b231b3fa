"""The plateau schedule against torch's, evaluation by evaluation."""

import math
import random

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer.engine.optim.plateau import Plateau
from trainer.engine.optim.tables import ScheduleState

PEAK = 0.3


def scores(seed, count=80):
    """Return scores that fall, stall and rise again, with equal ones among them."""
    draw = random.Random(seed)
    values = [5.0]
    for _ in range(count):
        step = draw.choice([-0.3, -0.01, -0.0001, 0.0, 0.0, 0.05, 0.2])
        values.append(max(0.05, values[-1] + step))
    return values


def rates(schedule, values, *, maximize=False, first=1):
    state, found = ScheduleState(), []
    for step, value in enumerate(values, first):
        schedule.after_evaluation(state, step, value, maximize=maximize)
        found.append(PEAK * schedule.lr_factor(step, 1000) * state.ratio)
    return found


def rates_of_torch(schedule, values, *, maximize=False):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    keys = schedule.model_dump(include={"factor", "patience", "threshold_mode", "cooldown"})
    scheduler = ReduceLROnPlateau(
        optimizer,
        "max" if maximize else "min",
        threshold=schedule.threshold,
        min_lr=PEAK * schedule.min_lr_ratio,
        eps=0.0,
        **keys,
    )
    found = []
    for value in values:
        scheduler.step(value)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"factor": 0.5, "patience": 0},
        {"factor": 0.5, "patience": 3},
        {"patience": 2, "threshold": 0.05},
        {"patience": 2, "threshold": 0.05, "threshold_mode": "abs"},
        {"factor": 0.7, "patience": 1, "cooldown": 4},
        {"factor": 0.3, "patience": 0, "cooldown": 1, "min_lr_ratio": 0.02},
    ],
    ids=str,
)
def test_rates_equal_those_of_torch(keys, maximize):
    schedule, num_reductions = Plateau(**keys), 0
    for seed in range(5):
        values = scores(seed)
        found = rates(schedule, values, maximize=maximize)
        assert found == pytest.approx(rates_of_torch(schedule, values, maximize=maximize), rel=1e-9)
        num_reductions += len(set(found)) - 1
    assert num_reductions > 5
    if schedule.min_lr_ratio:
        assert min(found) == PEAK * schedule.min_lr_ratio


def test_defaults_are_those_of_torch():
    values = [*scores(7, 40), *[9.0] * 25]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler, expected = ReduceLROnPlateau(optimizer), []
    for value in values:
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates(Plateau(), values) == pytest.approx(expected, rel=1e-9)
    assert len(set(expected)) > 1


def test_evaluations_before_the_end_of_the_warmup_do_not_count():
    schedule = Plateau(warmup_steps=4, patience=0, factor=0.5)
    found = rates(schedule, [1.0, 2.0, 3.0, 4.0, 3.9, 4.0])
    assert found == pytest.approx([PEAK * x for x in (0.4, 0.6, 0.8, 1.0, 1.0, 0.5)])


def test_a_score_that_is_not_finite_is_no_improvement():
    schedule = Plateau(patience=1, factor=0.5)
    ratios = [rate / PEAK for rate in rates(schedule, [math.nan, 3.0, -math.inf, math.nan, 2.0])]
    assert ratios == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.5])


def test_a_relative_threshold_is_a_share_of_the_size_of_a_negative_score():
    schedule = Plateau(patience=0, factor=0.5, threshold=0.1)
    better, slightly = [-1.0, -0.8, -0.6], [-1.0, -0.95, -0.91]
    assert rates(schedule, better, maximize=True) == pytest.approx([PEAK] * 3)
    assert rates(schedule, slightly, maximize=True)[-1] == pytest.approx(PEAK / 4)
    assert rates(schedule, [-1.0, -1.2], maximize=False) == pytest.approx([PEAK] * 2)
