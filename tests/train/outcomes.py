"""A few steps of several recipes, compared with one process."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.train.plans import assembled, recipe_with, whole
from trainer.engine.train.evaluate import validate

STEPS = 2


def few_steps(changes):
    """Return losses, norms and the validation loss, and the trained weights, of several recipes."""
    return [outcome(recipe_with(**each)) for each in changes]


def outcome(recipe):
    torch._dynamo.reset() if recipe.compile.enabled else None
    parts, numbers = assembled(recipe), []
    batches = parts.loader.steps(0)
    for step in range(STEPS):
        factor = recipe.schedule.lr_factor(step, STEPS)
        gradients = parts.step.accumulate(next(batches), factor)
        parts.step.update(factor)
        parts.step.clear()
        numbers += [gradients.loss.item(), gradients.norm.item()]
    return [*numbers, validate(parts)["loss"]], whole(parts.model)


def assert_equal(ranks, changes, like, tolerance=1e-5):
    """Compare runs on `ranks` ranks with one run of one process; 0: to the bit."""
    ((expected, weights),) = run_ranks(1, few_steps, [like], timeout=300)[0]
    for rank in run_ranks(ranks, few_steps, changes, timeout=500):
        for (numbers, found), recipe in zip(rank, changes, strict=True):
            assert numbers == pytest.approx(expected, abs=tolerance, rel=tolerance), recipe
            assert found.keys() <= weights.keys()
            for name, weight in found.items():
                assert abs(weight - weights[name]).max() <= tolerance, (name, recipe)
