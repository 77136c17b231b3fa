"""Where a device lacks float64, no step and no evaluation makes a tensor of it there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.plans import BASE, STEPS
from trainer.engine.assemble.assemble import assemble
from trainer.engine.launch.environment import World
from trainer.engine.observe.numbers import to_floats
from trainer.engine.recipe.schema import Recipe
from trainer.engine.train.evaluate import validate
from trainer.kernels import summation

EXPERTS = {
    "name": "qwen3",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 64,
    "moe": {"num_experts": 4, "expert_ffn_dim": 16, "capacity_factor": 1.25},
}
CASES = {
    "dense": {},
    "experts and padding": {"model": EXPERTS, "data": BASE["data"] | {"packing": "none"}},
    "experts and documents": {"model": EXPERTS, "data": BASE["data"] | {"packing": "documents"}},
}
NUMBERS = {
    "metrics": {
        "monitors": [
            {"name": "norms", "interval": 1},
            {"name": "histograms", "interval": 1},
        ]
    }
}


class RefusesFloat64(TorchDispatchMode):
    """Fails where an operation returns a tensor of float64, as it would on Apple's GPUs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if not isinstance(each, torch.Tensor) or each.device.type == "meta":
                continue
            if each.dtype is torch.float64:
                raise AssertionError(f"{func} returned float64")
        return found


def losses(recipe):
    parts = assemble(recipe, World(), torch.device("cpu"))
    found = []
    for step, batches in zip(range(STEPS), parts.loader.steps(0), strict=False):
        parts.step.monitors.begin(step + 1)
        gradients = parts.step.accumulate(batches, 1.0)
        parts.step.update(1.0)
        parts.step.clear()
        found.append(to_floats(parts.step.metrics(gradients, 0.1))["loss"])
    return [*found, validate(parts)["loss"]]


@pytest.mark.parametrize("name", CASES)
def test_no_float64_reaches_a_device_that_lacks_it(name, monkeypatch):
    recipe = Recipe.model_validate(BASE | NUMBERS | CASES[name])
    with pytest.raises(AssertionError, match="returned float64"), RefusesFloat64():
        losses(recipe)
    expected = losses(recipe)
    monkeypatch.setattr(summation, "WITHOUT_FLOAT64", {"cpu"})
    with RefusesFloat64():
        found = losses(recipe)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_dtype_of_sums_is_float64_where_a_device_has_it():
    for device in ("cpu", "cuda", "meta"):
        assert summation.sum_dtype(torch.device(device)) is torch.float64
    assert summation.sum_dtype(torch.device("mps")) is torch.float32
    assert summation.sum_dtype("mps") is torch.float32
