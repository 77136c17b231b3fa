"""Runs over training splits in turn: rows, resuming, epochs, and what surrounds a run."""

import json

import pytest

from tests.run.conftest import RECIPE
from trainer import evaluate, open_model
from trainer.engine.estimate.memory import estimate_memory
from trainer.engine.recipe.load import load_recipe
from trainer.engine.report.runs import read_run

SPLITS = """\
[[data.splits]]
name = "short"
steps = 2
[[data.splits.sources]]
name = "text"
path = "a.txt"

[[data.splits]]
name = "long"
seq_len = 64
micro_batch = 1
global_batch = 2
[[data.splits.sources]]
name = "jsonl"
path = "b.jsonl"
weight = 2.0
[[data.splits.sources]]
name = "text"
path = "a.txt"
"""


@pytest.fixture
def folder(tmp_path, command):
    """Write a recipe with two splits: rounds of 2 and 3 steps."""
    (tmp_path / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(350)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "jumps over the lazy dog " * 15}) + "\n")
    text = RECIPE.replace('[[data.sources]]\nname = "synthetic"\n', SPLITS)
    text = text.replace("interval = 2\nsteps = 1", "interval = 3\nsteps = 0")
    text = text.replace("seq_len = 32\n", "seq_len = 32\nvalidation_fraction = 0.3\n", 1)
    (tmp_path / "turns.toml").write_text(text.replace("steps = 4\n", "epochs = 2\n", 1))
    return tmp_path


def rows(run):
    kept = ("kind", "step", "loss", "total_loss", "grad_norm", "tokens", "samples", "split")
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: row[k] for k in row if k in kept or k.startswith("loss/")} for row in found]


def test_a_run_resumes_bit_for_bit_within_any_turn(folder, command):
    given = ["turns.toml", "--set=checkpoint.interval=3", "--set=checkpoint.keep=9"]
    code, _, errors = command("run", *given)
    assert code == 0, errors
    run = folder / "runs" / "r"
    whole = rows(run)
    train = [row for row in whole if row["kind"] == "train"]
    assert [row["split"] for row in train] == ["short", "short", "long", "long", "long"] * 2
    assert [row["samples"] for row in train] == [4, 8, 10, 12, 14, 18, 22, 24, 26, 28]
    assert [row["tokens"] for row in train[1:5]] == [8 * 32 + n * 2 * 64 for n in range(4)]
    assert {key for row in train for key in row if "/" in key} == {
        "loss/short.0.text", "loss/long.0.jsonl", "loss/long.1.text",
    }  # fmt: skip
    evals = [row for row in whole if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [3, 6, 9, 10]
    # Step 3 is in the first turn of the second split, step 6 in the second one of the first.
    for step in (3, 6):
        assert (
            command("run", run / "checkpoints" / f"step-{step:08d}", "--set=data.workers=1")[0] == 0
        )
        assert rows(run) == whole
    opened = open_model(run, dtype="fp32")
    texts = [evaluate(opened, split=f"validation.{name}")["token"] for name in ("short", "long")]
    mean = sum(each["loss"] * each["count"] for each in texts) / sum(
        each["count"] for each in texts
    )
    assert mean == pytest.approx(evals[-1]["loss"], abs=1e-3)
    curve = read_run(run, "r").rows["train"]
    assert [row["loss"] for row in curve] == [row["loss"] for row in train]


def test_an_epoch_is_a_round_over_the_splits(folder, command):
    words = ["evaluate.interval_epochs=1", "checkpoint.interval_epochs=1", "checkpoint.keep=9"]
    code, _, errors = command("run", "turns.toml", *(f"--set={word}" for word in words))
    assert code == 0, errors
    run = folder / "runs" / "r"
    assert [row["step"] for row in rows(run) if row["kind"] == "eval"] == [5, 10]
    assert sorted(each.name for each in (run / "checkpoints").glob("step-*")) == [
        "step-00000005", "step-00000010",
    ]  # fmt: skip
    code, _, errors = command("run", "turns.toml", "--set=data.splits.1.steps=4")
    assert code == 2
    assert "data.splits.1.steps: is 4, and none in the checkpoint" in errors


def test_the_sources_of_splits_are_shown_prepared_and_described(folder, command):
    code, shown, errors = command("run", "turns.toml", "--dry-run")
    assert code == 0, errors
    for line in ("split long: turns of 3 steps of 2 samples of 64 tokens", "2 x 1 samples"):
        assert line in shown
    code, shown, errors = command("data", "prepare", "turns.toml", "--out", "tokens")
    assert code == 0, errors
    recipe = shown[shown.index("[tokenizer]") :]
    (folder / "again.toml").write_text("[run]\nsteps = 1\n" + recipe)
    splits = load_recipe(folder / "again.toml").recipe.data.splits
    assert [each.name for each in splits] == ["short", "long"]
    assert [source.weight for source in splits[1].sources] == [2.0, 1.0]
    code, shown, errors = command("data", "inspect", "again.toml", "--json")
    assert code == 0, errors
    assert [each["tokens"] for each in json.loads(shown)] == [351, 361, 351]
    code, shown, _ = command("data", "prepare", "a.txt", "--recipe=turns.toml", "--out=one")
    assert code == 0
    assert "[[data.sources]]" in shown


def test_memory_is_that_of_the_largest_split(folder):
    settings = ["data.splits.1.micro_batch=2"]
    recipe = load_recipe(folder / "turns.toml", settings).recipe
    alone = ["data.splits=[]", "data.seq_len=64", "data.global_batch=2", "data.micro_batch=2"]
    other = load_recipe(folder / "turns.toml", alone).recipe
    (peak,), (expected,) = (estimate_memory(each, 1, on_gpu=False) for each in (recipe, other))
    assert peak == expected
