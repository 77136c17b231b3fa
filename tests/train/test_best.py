"""The best checkpoint and the early end of a run, against the rows that the run wrote."""

import json
import math
import os
import random
import time

import pytest

from tests.cases import also
from tests.train.processes import finish, rows, start, wait_for_lines, write_recipe
from trainer.cli.main import main
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import verify
from trainer.engine.launch.environment import World
from trainer.engine.recipe.load import load_recipe
from trainer.engine.run.run import run
from trainer.engine.train.parts import Best
from trainer.engine.train.tables import Evaluate

STEPS, PATIENCE = 15, 6
UNSTEADY = [
    "evaluate.interval=1",
    "checkpoint.keep_best=true",
    "optimizer.lr=0.3",  # so large that the validation loss goes up and down
    "schedule.name=constant",
    "precision.compute=fp32",
]


@pytest.fixture
def command(capsys):
    """Run a command line in this process; return what it prints."""

    def command(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert not stop.value.code
        return capsys.readouterr().out

    return command


def checkpoints(folder):
    return folder / "run" / "checkpoints"


def best_state(folder):
    return find_checkpoint(folder / "run").manifest.extra["best"]


def expected_end(losses, patience, min_delta=0.0):
    """Return step of the best loss and last step of a run that evaluates after every step."""
    best, at, bad = math.inf, 0, 0
    for step, loss in enumerate(losses, 1):
        if loss < best and (best == math.inf or best - loss >= min_delta):
            best, at, bad = loss, step, 0
        else:
            bad += 1
        if patience and bad >= patience:
            return at, step
    return at, len(losses)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run without early stopping, and its validation losses."""
    folder = tmp_path_factory.mktemp("best") / "reference"
    recipe = write_recipe(folder, steps=STEPS)
    assert finish(start(recipe, overrides=UNSTEADY)) == [0]
    return folder, [row["loss"] for row in rows(folder, "eval")]


def test_rows_hold_perplexity_and_the_alias_is_the_step_with_the_least_loss(reference):
    folder, losses = reference
    for row in rows(folder, "eval"):
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-12)
    step = losses.index(min(losses)) + 1
    assert step < STEPS - 3, "the newest ones are kept anyway"
    alias = checkpoints(folder) / "best"
    assert os.readlink(alias) == f"step-{step:08d}"
    found = find_checkpoint(alias)
    assert found.path.name == f"step-{step:08d}"
    assert not verify(found.path)
    assert best_state(folder)["score"] == min(losses)
    kept = sorted(path.name for path in checkpoints(folder).glob("step-*"))
    assert kept == [f"step-{step:08d}", f"step-{STEPS - 3:08d}", f"step-{STEPS:08d}"]


def test_prune_keeps_the_best_and_generate_takes_it_by_its_alias(reference, command):
    folder, losses = reference
    command("checkpoint", "prune", folder / "run", "--keep", 1)
    step = losses.index(min(losses)) + 1
    kept = sorted(path.name for path in checkpoints(folder).glob("step-*"))
    assert kept == [f"step-{step:08d}", f"step-{STEPS:08d}"]
    names = ("best", f"step-{step:08d}")
    paths = [checkpoints(folder) / name for name in names]
    texts = [command("generate", path, "--max-new-tokens", 4, "--prompt", "a") for path in paths]
    assert texts[0] == texts[1]


def test_checkpoint_list_names_the_best(reference, command):
    folder, losses = reference
    listed = json.loads(command("checkpoint", "list", folder / "run", "--json"))
    best = [row["step"] for row in listed if row["best"]]
    assert best == [losses.index(min(losses)) + 1]


@pytest.mark.parametrize("world", [2, *also(1)])
def test_a_run_ends_after_evaluations_without_improvement(reference, tmp_path, world):
    assert expected_end(reference[1], PATIENCE)[1] < STEPS, "the reference never gets worse"
    recipe = write_recipe(tmp_path / "run", steps=STEPS)
    settings = [*UNSTEADY, f"evaluate.patience={PATIENCE}"]
    assert finish(start(recipe, world, overrides=settings)) == [0] * world
    losses = [row["loss"] for row in rows(tmp_path / "run", "eval")]
    at, end = expected_end(losses, PATIENCE)
    assert len(losses) == end
    found = find_checkpoint(tmp_path / "run" / "run")
    assert found.manifest.step == end
    assert os.readlink(checkpoints(tmp_path / "run") / "best") == f"step-{at:08d}"
    assert best_state(tmp_path / "run")["bad"] == PATIENCE
    # Later it says so and trains no more; with another patience it goes on.
    assert finish(start(recipe, world, 1, settings)) == [0] * world
    assert len(rows(tmp_path / "run")) == end
    assert finish(start(recipe, world, 2, [*settings, "evaluate.patience=0"])) == [0] * world
    assert len(rows(tmp_path / "run")) == STEPS


def test_what_is_said_of_an_early_end(reference, tmp_path, capsys):
    at, end = expected_end(reference[1], 2)
    settings = [*UNSTEADY, "evaluate.patience=2"]
    recipe = load_recipe(write_recipe(tmp_path / "run", steps=STEPS), settings).recipe
    for word in ("stopped early", "stopped early before"):
        capsys.readouterr()
        assert run(recipe, World()) == 0
        told = capsys.readouterr().out.splitlines()[-1]
        assert told.startswith(f"{word}, loss not better in 2 evaluations (the best is ")
        assert f"at step {at})" in told
    assert len(rows(tmp_path / "run")) == end


def test_the_highest_score_is_the_best_with_direction_max(reference, tmp_path):
    losses = reference[1]
    recipe = write_recipe(tmp_path / "run", steps=STEPS)
    settings = [*UNSTEADY, "evaluate.direction=max", "evaluate.metric=perplexity"]
    assert finish(start(recipe, overrides=settings)) == [0]
    step = losses.index(max(losses)) + 1
    assert os.readlink(checkpoints(tmp_path / "run") / "best") == f"step-{step:08d}"


@pytest.mark.matrix
def test_kills_change_neither_the_best_nor_the_end(reference, tmp_path):
    settings = [*UNSTEADY, f"evaluate.patience={PATIENCE}", "ema.decay=0.5"]
    whole = write_recipe(tmp_path / "whole", steps=STEPS)
    assert finish(start(whole, overrides=settings)) == [0]
    recipe = write_recipe(tmp_path / "killed", steps=STEPS)
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    chance = random.Random(3)
    for attempt in range(5):
        before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        processes = start(recipe, 1, attempt, settings)
        wait_for_lines(metrics, before + chance.randrange(1, 6), processes)
        time.sleep(chance.uniform(0, 0.03))
        processes[0].kill()
        finish(processes)
    assert finish(start(recipe, 1, 9, settings)) == [0]
    for kind in ("train", "eval"):
        got, expected = (
            [(row["step"], row["loss"]) for row in rows(tmp_path / name, kind)]
            for name in ("killed", "whole")
        )
        assert got == expected
    assert best_state(tmp_path / "killed") == best_state(tmp_path / "whole")
    links = {os.readlink(checkpoints(tmp_path / name) / "best") for name in ("killed", "whole")}
    assert len(links) == 1


def kill_before_the_alias():
    """Die when the first best checkpoint is published and not yet pointed to."""
    from trainer.engine.checkpoint import retention

    retention.set_best_alias = lambda folder, step: os.kill(os.getpid(), 9)


def test_a_kill_between_checkpoint_and_alias_is_made_good(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    settings = ["checkpoint.keep_best=true", "evaluate.interval=2", "checkpoint.mode=sync"]
    assert finish(start(recipe, overrides=settings, before=kill_before_the_alias)) == [-9]
    assert not (checkpoints(tmp_path / "run") / "best").exists()
    without = [*settings, "evaluate.interval=0", "optimizer.lr=0.01"]
    assert finish(start(recipe, overrides=without)) == [0]
    assert os.readlink(checkpoints(tmp_path / "run") / "best") == "step-00000002"


def test_an_alias_beyond_the_step_gone_on_from_is_removed(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=12)
    settings = ["checkpoint.keep_best=true", "evaluate.interval=6", "checkpoint.keep=9"]
    assert finish(start(recipe, overrides=settings)) == [0]
    folder = checkpoints(tmp_path / "run")
    assert os.readlink(folder / "best") == "step-00000012"
    earlier = [*settings, f"run.resume={folder / 'step-00000003'}", "evaluate.interval=0"]
    assert finish(start(recipe, overrides=earlier)) == [0]
    assert not os.path.lexists(folder / "best")


def test_settings_without_an_effect_are_warned_about(tmp_path, capsys):
    settings = ["evaluate.interval=0", "evaluate.patience=3", "checkpoint.keep_best=true"]
    recipe = load_recipe(write_recipe(tmp_path / "run", steps=6), settings).recipe
    assert run(recipe, World()) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert len(told) == 2
    assert all("evaluate.interval is 0" in line for line in told)


def take_all(values, **settings):
    table, best = Evaluate(**settings), Best()
    taken = [
        best.update(table, step, {"loss": value, "perplexity": -value})
        for step, value in enumerate(values, 1)
    ]
    return taken, best


def test_changes_smaller_than_min_delta_are_no_improvement():
    taken, best = take_all([3.0, 2.95, 2.9, 2.5, 2.5], min_delta=0.25)
    assert taken == [True, False, False, True, False]
    assert (best.score, best.step, best.bad) == (2.5, 4, 1)
    taken, best = take_all([3.0, 2.95, 3.5], direction="max", min_delta=0.5)
    assert taken == [True, False, True]


def test_of_equal_scores_the_latest_is_the_best_and_none_is_an_improvement():
    taken, best = take_all([0.5, 0.75, 0.75, 0.5, 0.75], direction="max")
    assert taken == [True, True, True, False, True]
    assert (best.score, best.step, best.bad) == (0.75, 5, 3)


def test_a_metric_says_whether_higher_is_better():
    table = Evaluate(metric="validation.right", metrics=[{"name": "accuracy", "key": "right"}])
    best = Best()
    rows = [{"loss": 1.0, "right": value} for value in (0.5, 0.75, 0.25)]
    assert [best.update(table, step, row) for step, row in enumerate(rows)] == [True, True, False]
    assert (best.metric, best.direction, best.score) == ("right", "max", 0.75)
    assert Evaluate().settle({"loss": False}).direction == "min"
    assert Evaluate(metric="reward").settle({"reward": True}).direction == "max"
    assert Evaluate(metric="reward", direction="min").settle({"reward": True}).direction == "min"


def test_numbers_that_are_not_finite_never_are_the_best():
    taken, best = take_all([math.nan, math.inf, 2.0, -math.inf, math.nan])
    assert taken == [False, False, True, False, False]
    assert (best.score, best.bad) == (2.0, 2)
    assert take_all([math.inf, 1.0], direction="max")[0] == [False, True]


def test_another_metric_or_direction_starts_anew():
    _, best = take_all([3.0, 2.0, 2.5])
    table = Evaluate(direction="max", patience=1)
    assert not best.is_exhausted(table), "the count is of the other direction"
    assert best.update(table, 4, {"loss": 1.0})
    assert (best.score, best.step) == (1.0, 4)
