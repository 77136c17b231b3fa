"""The page of the speedrun says what its results say, and its recipes and spaces are valid."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tomli
from scipy import stats

import trainer
from trainer import load_recipe

ROOT = Path(trainer.__file__).parent.resolve()
TRIED = ROOT / "benchmarks/results/speedrun_tuning.jsonl"
ROWS = sorted({json.loads(line)["row"] for line in TRIED.read_text().splitlines()})
SHARED = ["data", "tokenizer", "precision", "evaluate", "model"]


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a module of the speedrun."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks/speedrun")
    return import_module


def test_the_table_is_that_of_the_results(module):
    table = module("table")
    assert table.markdown() in table.PAGE.read_text(), (
        "put it there by `python benchmarks/speedrun table --write`"
    )
    for row, runs in table.newest().items():
        recipe = tomli.loads((ROOT / f"recipes/speedrun/{row}.toml").read_text())
        assert all(run["recipe"] == recipe for run in runs)
        assert {run["seed"] for run in runs} <= set(range(1, 11))
        assert sum(run["cpu_seconds"] for run in runs) < 600


def test_the_statistics_are_those_of_scipy(module):
    table = module("table")
    theirs = np.array([150.0, 160, 155, 170, 165])
    ours = np.array([100.0, 95, 105, 110, 100])
    mean, low, high = table.interval(ours)
    expected = stats.ttest_1samp(ours, 0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((ours.mean(), *expected))
    ratio, _, most, p = table.compare(ours, theirs)
    assert ratio == pytest.approx(np.prod(ours / theirs) ** 0.2)
    assert p == pytest.approx(stats.ttest_1samp(np.log(ours / theirs), 0).pvalue)
    assert (most < 1) == (p < 0.05)
    runs = [{"steps": 5, "length": 9}, {"steps": None, "length": 9}]
    assert table.steps_of(runs).tolist() == [5, 9]


@pytest.mark.parametrize("row", ROWS)
def test_rows_change_the_update_alone_and_were_tuned_equally(row, module):
    tune = module("tune")
    base = load_recipe(ROOT / "recipes/base/speedrun.toml")
    recipe = load_recipe(ROOT / f"recipes/speedrun/{row}.toml")
    for table in SHARED:
        assert getattr(recipe, table) == getattr(base, table), table
    assert recipe.optimizer.clip_norm == 1.0
    trials = tune.tried(row)[: tune.TRIALS]  # a row may have more, which are not for its recipe
    assert len(trials) == tune.TRIALS
    for number, trial in enumerate(trials):
        places, length = tune.propose(row, trials[:number])
        assert (places, length) == (trial["places"], trial["length"]), "it is the trial that is due"
        assert trial["values"] == {key: tune.SPACES[row][key][at] for key, at in places.items()}
    best = tune.best_of(trials)
    assert recipe.run.steps == tune.stored_length(best)
    stored = recipe.model_dump()
    for key, value in best["values"].items():
        found = stored
        for part in key.split("."):
            found = found[part]
        assert json.loads(json.dumps(found)) == value, key
