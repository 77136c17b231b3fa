import math

import pytest
import torch
from transformers.optimization import get_inverse_sqrt_schedule, get_wsd_schedule

from trainer.engine.optim.schedules import (
    WSD,
    ConstantSchedule,
    Cosine,
    Exponential,
    InverseSqrt,
    LinearSchedule,
    Polynomial,
    Scaled,
)
from trainer.engine.optim.tables import schedules

TOTAL = 40
OWN = [name for name in schedules if not name.startswith("torch.")]


def factors(schedule, total=TOTAL):
    return [schedule.lr_factor(step, total) for step in range(total)]


def of_torch(make, total=TOTAL):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            Cosine(min_lr_ratio=0.1),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.1),
        ),
        (
            LinearSchedule(min_lr_ratio=0.2),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, TOTAL),
        ),
        (
            Exponential(min_lr_ratio=0.05),
            lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.05 ** (1 / TOTAL)),
        ),
        (
            Polynomial(power=3.0),
            lambda o: torch.optim.lr_scheduler.PolynomialLR(o, TOTAL, power=3.0),
        ),
        (ConstantSchedule(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        (
            InverseSqrt(timescale=7),
            lambda o: get_inverse_sqrt_schedule(o, num_warmup_steps=0, timescale=7),
        ),
        (
            WSD(decay_fraction=0.25),
            lambda o: get_wsd_schedule(
                o,
                num_warmup_steps=0,
                num_decay_steps=TOTAL // 4,
                num_stable_steps=TOTAL - TOTAL // 4,
                decay_type="linear",
            ),
        ),
        (
            WSD(decay_fraction=0.25, decay="cosine", min_lr_ratio=0.1),
            lambda o: get_wsd_schedule(
                o,
                num_warmup_steps=0,
                num_decay_steps=TOTAL // 4,
                num_stable_steps=TOTAL - TOTAL // 4,
                decay_type="cosine",
                min_lr_ratio=0.1,
            ),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_factors_equal_those_of_torch_and_transformers(ours, theirs):
    assert factors(ours) == pytest.approx(of_torch(theirs), abs=1e-9)


def test_sqrt_decay_is_one_minus_the_root_of_progress():
    schedule = WSD(decay_fraction=0.5, decay="sqrt")
    assert schedule.lr_factor(25, 40) == pytest.approx(1 - math.sqrt(5 / 20))


def test_power_decay_falls_as_a_power_of_what_is_left():
    schedule = WSD(decay_fraction=0.5, decay="power", decay_power=1.2, min_lr_ratio=0.1)
    assert schedule.lr_factor(25, 40) == pytest.approx(0.1 + 0.9 * (15 / 20) ** 1.2)


@pytest.mark.parametrize("name", [name for name in OWN if name != "scaled"])
def test_warmup_rises_in_equal_steps_to_the_peak(name):
    schedule = schedules[name](warmup_steps=4)
    assert factors(schedule)[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert schedule.lr_factor(4, TOTAL) == pytest.approx(1.0)


@pytest.mark.parametrize("name", OWN)
def test_only_schedules_that_say_so_depend_on_the_total(name):
    schedule = schedules[name]()
    changes = any(schedule.lr_factor(s, 40) != schedule.lr_factor(s, 80) for s in range(1, 40))
    assert changes == schedule.depends_on_total


@pytest.mark.parametrize("name", OWN)
def test_factors_stay_between_zero_and_one_for_any_length(name):
    for warmup in (0, 1, 5, 50):
        schedule = schedules[name](warmup_steps=warmup)
        for total in (1, 2, 5, 51):
            assert all(0 <= factor <= 1 for factor in factors(schedule, total))


def test_the_momentum_rises_at_the_start_and_falls_at_the_end():
    schedule = WSD(momentum_warmup_steps=4, momentum_cooldown_steps=2, momentum_min=0.5)
    found = [schedule.momentum(step, 10, 0.9) for step in range(10)]
    expected = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.7, 0.5]
    assert found == pytest.approx(expected)
    assert [schedule.momentum(step, 10, 0.3) for step in (0, 5, 9)] == [0.3] * 3, "never higher"
    assert schedule.changes_momentum
    assert not WSD().changes_momentum


def scaled(step, total, curve, scaling, warmup, cooldown, final=1e-3, low=1e-6):
    """Return the formula of DanLing's scheduler for a base rate of 1."""
    p = (step + 1) / total
    ratio = {"linear": p, "cosine": 1 - (1 + math.cos(math.pi * p)) / 2, "constant": 0}[curve]
    lr = final**ratio if scaling == "percentile" else (1 - ratio) * (1 - final) + final
    if step + 1 <= warmup:
        lr = (step + 1) / warmup * (lr - low) + low
    elif step + 1 > total - cooldown:
        lr = (1 - (step + 1 - (total - cooldown)) / cooldown) * (lr - low) + low
    return max(lr, low)


@pytest.mark.parametrize("scaling", ["percentile", "numerical"])
@pytest.mark.parametrize("curve", ["linear", "cosine", "constant"])
def test_a_scaled_curve_is_that_of_the_formula(curve, scaling):
    schedule = Scaled(curve=curve, scaling=scaling)
    for total in (60, 140, 57):
        ends = total // 20, total // 5
        expected = [scaled(step, total, curve, scaling, *ends) for step in range(total)]
        assert factors(schedule, total) == pytest.approx(expected, rel=1e-12)
    longer = Scaled(curve=curve, scaling=scaling, warmup_steps=9, cooldown_fraction=0.0)
    expected = [scaled(step, 40, curve, scaling, 9, 0) for step in range(40)]
    assert factors(longer) == pytest.approx(expected, rel=1e-12)
