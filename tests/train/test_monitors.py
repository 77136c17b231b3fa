"""Monitors measure what a step of the whole model does, under any plan, and only when due."""

from typing import Literal

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from tests.train.moe_family import moe_recipe
from tests.train.plans import assembled, recipe_with
from tests.train.processes import complaints, finish, rows, start, write_recipe
from trainer.engine.core.errors import RecipeError
from trainer.engine.observe.monitors.monitored_model import MonitoredModel
from trainer.engine.observe.monitors.monitors import Monitors
from trainer.engine.observe.numbers import to_floats, to_histograms
from trainer.engine.observe.tables import Histograms, Monitor, MonitorConfig
from trainer.engine.recipe.load import load_recipe

CPU = torch.device("cpu")
KINDS = ["weights", "gradients", "updates", "update_ratios"]
NORMS = {"metrics": {"monitors": [{"name": "norms", "interval": 2, "of": KINDS}]}}
HISTOGRAMS = {"name": "histograms", "interval": 2, "bins": 16}
BY_PARAMETER = {
    "monitors": [
        {**NORMS["metrics"]["monitors"][0], "by": "parameter"},
        {**HISTOGRAMS, "by": "parameter", "match": "layers.*"},
    ]
}


def run_steps(recipe, steps=2):
    """Return the numbers of monitors of each step."""
    parts, numbers = assembled(recipe), []
    batches = parts.loader.steps(0)
    for step in range(1, steps + 1):
        parts.step.monitors.begin(step)
        gradients = parts.step.accumulate(next(batches), 1.0)
        parts.step.update(1.0)
        values = parts.step.metrics(gradients, 0.1)
        metrics = to_floats(values) | to_histograms(values)
        numbers.append({key: value for key, value in metrics.items() if "/" in key})
        parts.step.clear()
    return numbers


def numbers_of_several(recipes):
    return [run_steps(recipe)[1] for recipe in recipes]


def compare_with_formulas(recipe):
    """Compare the second step with norms and histograms in float64 of whole weights."""
    parts = assembled(recipe)
    batches = parts.loader.steps(0)
    parts.step.accumulate(next(batches), 1.0)
    parts.step.update(1.0)
    parts.step.clear()
    parts.step.monitors.begin(2)
    weights = dict(parts.model.named_parameters())
    before = {name: weight.detach().double() for name, weight in weights.items()}
    gradients = parts.step.accumulate(next(batches), 1.0)
    assert gradients.norm > recipe.optimizer.clip_norm, "the test is to see a clipped gradient"
    unclipped = gradients.norm.double() / recipe.optimizer.clip_norm
    slopes = {name: weight.grad.double() * unclipped for name, weight in weights.items()}
    parts.step.update(1.0)
    values = parts.step.metrics(gradients, 0.1)
    found, histograms = to_floats(values), to_histograms(values)
    for name, weight in weights.items():
        change = weight.detach().double() - before[name]
        expected = {
            "weight_norm": before[name].norm(),
            "grad_norm": slopes[name].norm(),
            "update_norm": change.norm(),
            "update_ratio": change.norm() / before[name].norm(),
        }
        for key, norm in expected.items():
            assert found[f"{key}/{name}"] == pytest.approx(norm.item(), rel=1e-4), (key, name)
        if name.startswith("layers."):
            measured = {"weight": before[name], "grad": slopes[name], "update": change}
            for key, values in measured.items():
                counts, edges = np.histogram(values.numpy(), bins=16)
                histogram = histograms.pop(f"{key}_histogram/{name}")
                assert histogram["counts"] == counts.tolist()
                ends = [histogram["low"], histogram["high"]]
                assert ends == pytest.approx(edges[[0, -1]], rel=1e-5), (key, name)
    assert not histograms, "the pattern leaves them out"
    assert sum(key.count("/") for key in found) == 4 * len(weights)


def test_norms_are_those_of_the_weights_before_and_after_a_step():
    (_,) = run_ranks(1, compare_with_formulas, recipe_with(metrics=BY_PARAMETER))


def test_layers_join_the_parameters_of_a_block():
    layers, parameters = run_ranks(
        1, numbers_of_several, [recipe_with(**NORMS), recipe_with(metrics=BY_PARAMETER)]
    )[0]
    names = {key.partition("/")[2] for key in layers}
    assert names == {"embed", "layers.0", "layers.1", "head.norm", "head.proj"}
    squares = [
        value**2 for key, value in parameters.items() if key.startswith("grad_norm/layers.1.")
    ]
    assert layers["grad_norm/layers.1"] == pytest.approx(sum(squares) ** 0.5, rel=1e-6)


def test_ranks_measure_what_one_process_does():
    plans = [
        {"tensor": 2, "shard": 2},
        {"pipeline": 2, "expert": 2},
        {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}},
    ]
    monitors = [*NORMS["metrics"]["monitors"], HISTOGRAMS]
    changes = {"metrics": {"monitors": monitors}, "model": {"n_layers": 2}}
    tied = recipe_with(**NORMS, model={"dim": 32, "n_layers": 2, "tie_embeddings": True})
    (alone,) = run_ranks(1, numbers_of_several, [moe_recipe(**changes), tied])
    split = tied.model_copy(update={"parallel": tied.parallel.model_copy(update={"pipeline": 2})})
    recipes = [*(moe_recipe(**changes, parallel=plan) for plan in plans), split]
    for found in run_ranks(4, numbers_of_several, recipes, timeout=200):
        for plan, numbers in zip(plans, found[:-1], strict=True):
            assert_alike(numbers, alone[0], plan)
        assert found[-1] == pytest.approx(alone[1], rel=1e-4, abs=1e-6)


def assert_alike(numbers, expected, plan):
    """Compare numbers with those of one process; histograms up to values at the edges of bins."""
    assert numbers.keys() == expected.keys()
    for key, value in numbers.items():
        if "histogram" not in key:
            assert value == pytest.approx(expected[key], rel=1e-4, abs=1e-6), (plan, key)
            continue
        found, wanted = value["counts"], expected[key]["counts"]
        # Rounding moves a few values to the next bin, and those of the last one with its edge.
        assert sum(found) == sum(wanted), (plan, key)
        moved = np.abs(np.cumsum(found) - np.cumsum(wanted)).max()
        assert moved <= 0.002 * sum(wanted), (plan, key)
        ends = [expected[key]["low"], expected[key]["high"]]
        assert [value["low"], value["high"]] == pytest.approx(ends, rel=1e-3, abs=1e-6), (plan, key)


def test_values_that_are_not_finite_are_counted_apart():
    weight = torch.nn.Parameter(torch.tensor([0.0, 1, 2, torch.nan, torch.inf, 4]))
    still = torch.nn.Parameter(torch.full((3,), 5.0))
    model = MonitoredModel(torch.nn.Module(), {"a.w": weight, "b.w": still}, ["a.w", "b.w"], 1, CPU)
    monitors = Monitors([Histograms(interval=1, of=["weights"], bins=4)], model)
    monitors.begin(1)
    monitors.before_update(None)
    monitors.after_update()
    found = to_histograms(monitors.metrics())
    assert found == {
        "weight_histogram/a": {"low": 0.0, "high": 4.0, "counts": [1, 1, 1, 1], "non_finite": 2},
        "weight_histogram/b": {"low": 4.5, "high": 5.5, "counts": [0, 0, 3, 0]},
    }
    with pytest.raises(RecipeError, match=r'"c\.\*" matches no weight'):
        Monitors([Histograms(match="c.*")], model)


class Calls(Monitor):
    """Notes the calls, and refuses those of steps that are not due."""

    num_sums = 1

    def __init__(self, calls):
        self.calls = calls

    def before_forward(self):
        self.calls.append("before_forward")

    def after_backward(self):
        self.calls.append("after_backward")

    def before_update(self, sums, clip_factor):
        sums += 3

    def after_update(self, sums):
        sums *= 2

    def metrics(self, sums):
        return {"sum": sums[0]}


class CallsConfig(MonitorConfig):
    name: Literal["calls"] = "calls"

    def build(self, model):
        return Calls(model.names)


def test_steps_that_are_not_due_or_skipped_measure_nothing():
    calls = []
    model = MonitoredModel(torch.nn.Module(), {}, calls, 1, CPU)
    monitors = Monitors([CallsConfig(interval=3)], model)
    found = {}
    for step in range(1, 10):
        monitors.begin(step)
        monitors.after_backward()
        if step != 6:  # is skipped
            monitors.before_update(None)
            monitors.after_update()
        found |= {step: to_floats(monitors.metrics())} if step % 3 == 0 else {}
        assert len(calls) == 2 * (step // 3)
    assert found == {3: {"sum": 6.0}, 6: {}, 9: {"sum": 6.0}}


def test_a_run_writes_a_row_where_a_monitor_is_due(tmp_path):
    recipe = write_recipe(tmp_path / "a", steps=7)
    overrides = ["metrics.interval=5", "metrics.monitors=[{name='norms', interval=3}]"]
    assert finish(start(recipe, 2, overrides=overrides)) == [0, 0], complaints(recipe)
    measured = {row["step"]: "update_norm/layers.0" in row for row in rows(tmp_path / "a")}
    assert measured == {1: False, 3: True, 5: False, 6: True, 7: False}


def test_monitors_are_checked(tmp_path):
    path = tmp_path / "r.toml"
    base = "[run]\nsteps = 1\n[memory]\noptimizer_in_backward = true\n[optimizer]\nclip_norm = 0\n"
    path.write_text(base + "[[metrics.monitors]]\nname = 'norms'\n")
    with pytest.raises(RecipeError, match="monitors need the gradients and weights of a whole"):
        load_recipe(path, [])
    histograms = "name = 'histograms'\nmatch = 're:('"
    path.write_text(f"[run]\nsteps = 1\n[[metrics.monitors]]\n{histograms}\n")
    with pytest.raises(RecipeError, match=r"re:\(.* is no regular expression"):
        load_recipe(path, [])
    path.write_text("[run]\nsteps = 1\n[[metrics.monitors]]\nname = 'norm'\n")
    with pytest.raises(RecipeError, match=r"no monitor is named .*norm.*known: histograms, norms"):
        load_recipe(path, [])
