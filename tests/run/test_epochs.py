"""Intervals in epochs, the whole validation split, and results.json."""

import json

import numpy as np
import pytest

from tests.run.conftest import RECIPE
from trainer.engine.checkpoint.find import candidates
from trainer.engine.data.loader import iterate_validation
from trainer.engine.run.library import assemble, load_recipe


@pytest.fixture
def texts(tmp_path, command):
    """Give the recipe 42 rows to train on and 11 to validate with."""
    for name, rows in (("train", 42), ("held", 11)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i % 26) for i in range(rows * 32)))
    sources = '[[data.sources]]\nname = "text"\npath = "train.txt"\n'
    sources += '[[data.sources]]\nname = "text"\npath = "held.txt"\nsplit = "validation"\n'
    text = RECIPE.replace('[[data.sources]]\nname = "synthetic"\n', sources)
    (tmp_path / "recipe.toml").write_text(text.replace("steps = 4\n", "epochs = 3\n", 1))
    return tmp_path


def steps(run, kind):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["kind"] == kind]


def test_intervals_and_warmup_may_be_given_in_epochs(texts, command):
    words = ["evaluate.interval_epochs=1", "checkpoint.interval_epochs=2", "checkpoint.keep=9"]
    words += ["schedule.warmup_epochs=0.5"]
    code, _, errors = command("run", "recipe.toml", *(f"--set={word}" for word in words))
    assert code == 0, errors
    run = texts / "runs" / "r"
    # 42 rows are 10.5 batches of 4: epochs end in steps 11, 21 and 32, and the run after 31.
    assert steps(run, "eval") == [11, 21, 31]
    saved = sorted(each.name for each in (run / "checkpoints").glob("step-*"))
    assert saved == ["step-00000021", "step-00000031"]
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rates = {row["step"]: row["lr"] for row in rows if row["kind"] == "train"}
    # Half an epoch is 5.25 steps.
    assert [rates[step] / rates[31] for step in (1, 5, 6)] == pytest.approx([1 / 6, 5 / 6, 1])


def test_a_warmup_in_epochs_that_is_longer_than_the_run_is_refused(texts, command):
    code, _, errors = command("run", "recipe.toml", "--set=schedule.warmup_epochs=4")
    assert code == 2
    assert "schedule.warmup_epochs: 4 epochs are 42 steps, more than the 31 of the run" in errors


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_steps_mean_all_of_the_validation_split_whatever_the_ranks(texts, ranks):
    recipe = load_recipe(texts / "recipe.toml", {"evaluate.steps": 0, "data.micro_batch": 2})
    parts = assemble(recipe)
    split = parts.data.turns[0].opened.validation
    found = []
    for rank in range(ranks):
        batches = list(iterate_validation(split, recipe.data, 0, rank, ranks))
        assert len({len(batch.labels) for batch in batches}) == 1
        found += [row.tolist() for batch in batches for row in batch.labels if (row >= 0).any()]
    expected = [
        split.gather(np.array([number])).to_batch().labels[0].tolist() for number in range(11)
    ]
    assert sorted(found) == sorted(expected)
    if ranks == 1:
        assert [len(each.batches) for each in parts.splits] == [6]


def read_results(run):
    return json.loads((run / "results.json").read_text())


def test_results_hold_the_latest_and_the_best_evaluation(texts, command):
    run = texts / "runs" / "r"
    words = ["schedule.name=constant", "evaluate.interval=5", "checkpoint.interval=10"]
    # At this rate the loss soon climbs: the best evaluation is an early one.
    words += ["optimizer.lr=0.3", "optimizer.clip_norm=0.0", "checkpoint.keep=9"]
    given = [f"--set={word}" for word in words]
    assert command("run", "recipe.toml", *given)[0] == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}
    best = min(losses, key=losses.get)
    found = read_results(run)
    assert (found["latest"]["step"], found["latest"]["loss"]) == (31, losses[31])
    assert (found["best"]["step"], found["best"]["loss"]) == (best, losses[best])
    assert (found["best"]["metric"], found["best"]["direction"]) == ("loss", "min")
    # Resumed from an earlier step, the run forgets what came later, and finds the same again.
    assert command("run", run / "checkpoints" / "step-00000010")[0] == 0
    assert read_results(run) == found


def test_latest_leads_to_the_newest_checkpoint(texts, command):
    run = texts / "runs" / "r"
    assert command("run", "recipe.toml", "--set=checkpoint.interval=10")[0] == 0
    (newest, *_) = candidates(run)
    assert (run / "checkpoints" / "latest").resolve() == newest
    assert newest.name == "step-00000031"
    code, shown, _ = command("checkpoint", "verify", run / "checkpoints" / "latest")
    assert code == 0, shown
