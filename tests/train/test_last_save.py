"""A run whose last state cannot be saved has failed, and says what is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from tests.cases import also
from tests.mounted import mounted_tmpfs
from tests.train.processes import (
    complaints,
    finish,
    rows,
    start,
    tensors,
    wait_for_lines,
    write_recipe,
)
from tests.train.test_lifecycle import poison_step_5, slow_steps
from trainer.engine.report.status import examine
from trainer.engine.train.saving import Saver

ROOT = Path(trainer.__file__).absolute().parents[1]
STEPS = 10
FULL = f"checkpoint.before_write:step{STEPS}:full"


def hurry():
    Saver.pauses_seconds = (0.05, 0.05)


def hurry_with_slow_steps():
    hurry()
    slow_steps()


def hurry_with_poison():
    hurry()
    poison_step_5()


def outcome(folder):
    """Return what `trainer status` says, with the lines on stderr."""
    found = examine(folder / "run")
    return found.state, found.reason, complaints(folder / "recipe.toml")


@pytest.mark.parametrize(
    ("world", "mode", "interval", "where"),
    [
        (1, "sync", 0, "steps 1 to 10 are lost, no checkpoint is intact"),
        (1, "async", 3, "step 10 is lost, the newest intact checkpoint is"),
        (1, "async_pinned", 4, "steps 9 to 10 are lost, the newest intact checkpoint is"),
        *also(
            (2, "sync", 3, "step 10 is lost, the newest intact checkpoint is"),
            (2, "async", 0, "steps 1 to 10 are lost, no checkpoint is intact"),
        ),
    ],
)
def test_a_last_save_that_fails_again_and_again_fails_the_run(
    tmp_path, world, mode, interval, where
):
    recipe = write_recipe(tmp_path / "run", STEPS)
    settings = [f"checkpoint.mode={mode}", f"checkpoint.interval={interval}"]
    fault = FULL.replace("step", f"rank{world - 1}:step")  # of one rank, and all learn of it
    codes = finish(start(recipe, world, overrides=settings, before=hurry, fault=fault))
    assert codes == [5] * world
    state, reason, printed = outcome(tmp_path / "run")
    assert state == "failed"
    assert where in reason
    assert where in printed
    assert "no space for a checkpoint" in printed
    assert finish(start(recipe, world, attempt=1, overrides=settings)) == [0] * world
    assert outcome(tmp_path / "run")[0] == "finished"


@pytest.mark.parametrize(("world", "mode"), [(2, "async"), *also((1, "sync"))])
def test_a_last_save_that_fails_twice_is_tried_again(tmp_path, world, mode):
    recipe = write_recipe(tmp_path / "run", STEPS)
    settings, fault = [f"checkpoint.mode={mode}"], FULL.replace(":full", ":x2:full")
    assert finish(start(recipe, world, 0, settings, before=hurry, fault=fault)) == [0] * world
    assert tensors(tmp_path / "run")[0] == STEPS
    assert outcome(tmp_path / "run")[0] == "finished"


@pytest.mark.parametrize("mode", ["async", *also("sync")])
def test_a_save_that_fails_at_a_signal_is_no_stop_with_a_checkpoint(tmp_path, mode):
    recipe = write_recipe(tmp_path / "run", 10_000)
    settings = [f"checkpoint.mode={mode}", "checkpoint.interval=0"]
    before, fault = hurry_with_slow_steps, "checkpoint.before_write:full"
    processes = start(recipe, overrides=settings, before=before, fault=fault)
    wait_for_lines(tmp_path / "run" / "run" / "metrics.jsonl", 3, processes)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert finish(processes) == [5]
    state, reason, _ = outcome(tmp_path / "run")
    assert state == "failed"
    assert "are lost, no checkpoint is intact" in reason


def test_the_third_save_in_a_row_that_fails_ends_the_run(tmp_path):
    recipe = write_recipe(tmp_path / "run", 100)
    fault = "checkpoint.before_write:full"
    assert finish(start(recipe, before=hurry, fault=fault)) == [5]
    assert rows(tmp_path / "run")[-1]["step"] == 9
    assert "steps 1 to 9 are lost" in outcome(tmp_path / "run")[1]


def test_a_rollback_survives_the_failure_of_a_save_in_flight(tmp_path):
    """The save after step 6 fails while step 8 turns out to be bad: that after step 3 is there."""
    recipe = write_recipe(tmp_path / "run", 12)
    settings = ["resilience.non_finite=rollback", "checkpoint.interval=2"]
    fault = "checkpoint.before_write:step4:x1:full"
    assert finish(start(recipe, 1, 0, settings, before=hurry_with_poison, fault=fault)) == [0]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 13))


def launched(folder, fault, *options):
    """Run `trainer run --nproc 2` and return its exit code and stderr."""
    recipe = write_recipe(folder, STEPS)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer", "run", str(recipe), "--nproc", "2", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRAINER_FAULT": fault, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("point", ["before_write", "after_write", "before_copy"])
def test_a_rank_that_dies_in_its_last_save_is_named_and_nothing_is_finished(tmp_path, point):
    code, printed = launched(
        tmp_path / "run", f"checkpoint.{point}:rank1:step10:kill", "--set=checkpoint.mode=sync"
    )
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in printed
    assert examine(tmp_path / "run" / "run").state == "failed"


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder with room for one checkpoint and a half."""
    with mounted_tmpfs(tmp_path / "disk", 1) as folder:
        yield folder


@pytest.mark.parametrize("world", [2, *also(1)])
def test_a_disk_that_is_full_at_the_end_fails_the_run(tmp_path, small_disk, world):
    recipe = write_recipe(tmp_path / "run", STEPS)
    settings = [f"run.dir={small_disk}", "checkpoint.interval=5", "checkpoint.mode=sync"]
    assert finish(start(recipe, world, overrides=settings, before=hurry)) == [5] * world
    found = examine(small_disk / "run")
    assert found.state == "failed"
    assert "no space" in found.reason
    assert "are lost" in found.reason
