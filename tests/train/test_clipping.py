"""Clipping by norm and by value, against torch's functions for whole gradients."""

import pytest
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.distributed import run_ranks
from tests.train.outcomes import assert_equal, few_steps
from tests.train.plans import BASE, assembled, recipe_with, whole
from trainer.engine.observe.numbers import to_floats

SGD = BASE["optimizer"] | {"clip_norm": 0.0}
WHOLE = BASE["data"] | {"micro_batch": 8}


def clip_by_torch(changes, clip_norm, clip_value):
    """Return the weights after two steps whose gradients torch clips."""
    parts = assembled(recipe_with(**changes))
    weights, largest = list(parts.model.parameters()), []
    batches = parts.loader.steps(0)
    for _ in range(2):
        parts.step.accumulate(next(batches), 1.0)
        if clip_norm:
            clip_grad_norm_(weights, clip_norm)
        largest.append(max(weight.grad.abs().max().item() for weight in weights))
        clip_grad_value_(weights, clip_value)
        parts.step.update(1.0)
        parts.step.clear()
    return whole(parts.model), largest


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_elements_are_clipped_after_the_norm_as_torch_does(clip_norm):
    keys = {"clip_norm": clip_norm, "clip_value": 0.01}
    plain = {"data": WHOLE, "optimizer": SGD}
    ((expected, largest),) = run_ranks(1, clip_by_torch, plain, *keys.values())
    assert min(largest) > 0.02, "the test is to clip"
    ((_, found),) = run_ranks(1, few_steps, [plain | {"optimizer": SGD | keys}])[0]
    for name, weight in found.items():
        assert weight == pytest.approx(expected[name], abs=1e-7), name


def test_elements_are_clipped_under_plans_and_in_the_backward_pass():
    like = {"data": WHOLE, "optimizer": SGD | {"clip_value": 0.01}}
    inside = {"memory": {"optimizer_in_backward": True}}
    changes = [
        like | {"parallel": {"shard": 2}},
        like | {"parallel": {"tensor": 2}},
        like | {"parallel": {"pipeline": 2}, "data": BASE["data"]},
        like | inside | {"parallel": {"shard": 2}},
    ]
    assert_equal(2, changes, like)


def gradients_after_norms():
    """Return the largest norm that a monitor shows of clipped gradients."""
    norms = {"metrics": {"monitors": [{"name": "norms", "interval": 1, "by": "parameter"}]}}
    numbers = []
    for clip_value in (0.0, 1e-4):
        optimizer = {"optimizer": SGD | {"clip_value": clip_value}}
        parts = assembled(recipe_with(data=WHOLE, **norms, **optimizer))
        parts.step.monitors.begin(1)
        gradients = parts.step.accumulate(next(parts.loader.steps(0)), 1.0)
        parts.step.update(1.0)
        values = to_floats(parts.step.metrics(gradients, 0.1))
        numbers.append({key: value for key, value in values.items() if "grad_norm/" in key})
    return numbers


def test_monitors_show_gradients_before_their_elements_are_clipped():
    plain, clipped = run_ranks(1, gradients_after_norms)[0]
    assert clipped == plain
    assert len(plain) > 5
