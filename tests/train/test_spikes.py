"""Spikes and slow divergence among the losses and gradient norms of steps."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.engine.train.spikes import SpikeDetector, loss_level, norm_level

VALUES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=130)


def limits(losses, norms, threshold):
    """Return the limits by numpy in float64."""
    middle = np.median(losses)
    mad = np.median(np.abs(np.array(losses) - middle))
    logs = np.log(np.array(norms))
    log_mad = np.median(np.abs(logs - np.median(logs)))
    loss = middle + threshold * max(1.4826 * mad, 0.02 * max(abs(middle), 1))
    return loss, np.exp(np.median(logs) + threshold * max(1.4826 * log_mad, 0.2))


@given(losses=VALUES, norms=VALUES, threshold=st.floats(0.5, 30))
@settings(deadline=None)
def test_the_limits_are_those_of_the_formula_in_numpy(losses, norms, threshold):
    loss, norm = limits(losses, norms, threshold)
    assert loss_level(losses, threshold).limit == pytest.approx(loss, rel=1e-9)
    assert math.log(norm_level(norms, threshold).limit) == pytest.approx(
        min(np.log(norm), 700.0), rel=1e-9, abs=1e-9
    )


@given(losses=VALUES, factor=st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_gradient_norms_are_judged_alike_in_every_unit(losses, factor):
    plain, scaled = norm_level(losses, 8.0), norm_level([factor * each for each in losses], 8.0)
    if plain.limit < 1e200:
        assert scaled.limit == pytest.approx(factor * plain.limit, rel=1e-6)


def feed(detector, losses, norms=None, start=1):
    """Return the steps that are spikes and those at which the run begins to diverge."""
    norms = [1.0] * len(losses) if norms is None else norms
    spikes, drifts = [], []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start):
        if detector.judge(loss, norm):
            spikes.append(step)
        if detector.add(step, loss, norm):
            drifts.append(step)
    return spikes, drifts


def ordinary(rng, steps, noise=0.1):
    """Return a loss that falls from 11 to 2.5, and log-normal norms."""
    t = np.arange(steps)
    losses = 2.5 + 8.5 * np.exp(-t / 60) + noise * rng.standard_normal(steps)
    norms = np.exp(0.25 * rng.standard_normal(steps)) * (0.5 + 3 * np.exp(-t / 40))
    return losses.tolist(), norms.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_an_ordinary_run_has_no_spikes_and_one_that_is_put_in_is_found(seed):
    rng = np.random.default_rng(seed)
    losses, norms = ordinary(rng, 600, noise=0.02 * 2 ** (seed % 4))
    detector = SpikeDetector(128, 8.0)
    assert feed(detector, losses, norms) == ([], [])
    assert detector.losses()[0] < detector.loss_limit()
    losses[500] += 4.0
    norms[300] *= 60.0
    assert feed(SpikeDetector(128, 8.0), losses, norms)[0] == [301, 501]


def test_constant_numbers_and_falling_ones_are_no_spikes():
    assert feed(SpikeDetector(128, 8.0), [0.0] * 300, [1e-6] * 300) == ([], [])
    assert feed(SpikeDetector(128, 8.0), [2.0] * 200 + [0.001] * 200) == ([], [])
    falling = [10 / step for step in range(1, 400)]
    assert feed(SpikeDetector(128, 8.0), falling, falling) == ([], [])


@pytest.mark.parametrize("rate", [0.003, 0.01, 0.05, 0.3])
def test_a_loss_that_explodes_slowly_is_found(rate):
    """Too slow to be a spike, some of them, and all end far above where they began."""
    losses = [2.5] * 200
    while losses[-1] < 1e7 and len(losses) < 2000:
        losses.append(losses[-1] * math.exp(rate))
    detector = SpikeDetector(128, 8.0)
    spikes, drifts = feed(detector, losses)
    assert drifts or rate == 0.3, "in fifty steps the window does not turn: all are spikes"
    assert min(spikes + drifts) < 200 + 3 / rate + 128
    assert detector.losses()[0] > detector.loss_limit()


@pytest.mark.parametrize("steps", [5, 20, 40, 500])
def test_a_run_that_explodes_from_its_first_steps_does_not_end_well(steps):
    detector = SpikeDetector(128, 8.0)
    feed(detector, [5.5, 7.0, 30.0, *[1e7] * steps])
    assert detector.losses()[0] > detector.loss_limit()
    assert detector.losses()[1:] == (5.5, 1)


def test_a_step_without_gradient_is_left_out():
    detector = SpikeDetector(16, 8.0)
    feed(detector, [0.0] * 50, [0.0] * 50)
    assert detector.state()["steps"] == []
    assert detector.losses()[0] < detector.loss_limit()


@given(cut=st.integers(0, 120), window=st.sampled_from([8, 16, 128]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_a_restored_detector_decides_alike(cut, window, seed):
    rng = np.random.default_rng(seed)
    losses, norms = ordinary(rng, 120)
    losses = [loss * (5 if rng.random() < 0.1 else 1) for loss in losses]
    detector = SpikeDetector(window, 4.0)
    whole = feed(detector, losses, norms)
    first, second = SpikeDetector(window, 4.0), SpikeDetector(window, 4.0)
    before = feed(first, losses[:cut], norms[:cut])
    second.restore(first.state())
    after = feed(second, losses[cut:], norms[cut:], cut + 1)
    assert tuple(a + b for a, b in zip(before, after, strict=True)) == whole
    assert second.state() == detector.state()


CURVES = json.loads((Path(__file__).parent / "curves.json").read_text())


@pytest.mark.parametrize("recipe", CURVES)
def test_the_shipped_recipes_have_no_spikes(recipe):
    """Losses and norms of every step, as these recipes had them when spikes were built."""
    curve = CURVES[recipe]
    detector = SpikeDetector(128, 8.0)
    assert feed(detector, curve["loss"], curve["grad_norm"]) == ([], [])
    assert detector.losses()[0] < detector.loss_limit()
