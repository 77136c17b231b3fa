"""Full and read-only disks under a run: what was saved stays, and the run says what happened."""

import os
import signal
import subprocess

import pytest

from tests.faults.test_kills import assert_same_run
from tests.mounted import mounted_tmpfs
from tests.train.processes import complaints, finish, start, wait_for_lines, write_recipe
from tests.train.test_last_save import hurry
from tests.train.test_lifecycle import slow_steps
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.report.status import examine

STEPS = 30
MODES = ("sync", "async", "async_pinned")


class Disk:
    """A file system of its own that a test fills, empties, locks and unlocks."""

    def __init__(self, folder):
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, left=0):
        """Leave so many bytes."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                file.truncate(file.tell() - left)

    def empty(self):
        self._ballast.unlink()

    def protect(self, folder):
        """Make a folder read-only, for root too and while files in it are open."""
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)

    def unprotect(self, folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path):
    with mounted_tmpfs(tmp_path / "disk", 8) as folder:
        yield Disk(folder)


def hurry_with_slow_steps():
    hurry()
    slow_steps()


def settings_of(disk, mode):
    return [f"run.dir={disk.folder}", f"checkpoint.mode={mode}"]


def begin(tmp_path, disk, world, mode):
    """Start a run on the disk; return its recipe and processes when some steps are done."""
    recipe = write_recipe(tmp_path / "run", STEPS)
    settings = settings_of(disk, mode)
    processes = start(recipe, world, 0, settings, before=hurry_with_slow_steps)
    wait_for_lines(disk.folder / "run" / "metrics.jsonl", 7, processes)
    return recipe, processes


def assert_resumes_like_the_reference(tmp_path, disk, recipe, world, mode):
    assert finish(start(recipe, world, 1, settings_of(disk, mode)), timeout=200) == [0] * world
    reference = write_recipe(tmp_path / "reference", STEPS)
    assert finish(start(reference, world, 0), timeout=200) == [0] * world
    assert_same_run(disk.folder, tmp_path / "reference")


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_run_on_a_bad_disk_fails_and_resumes_when_the_disk_is_mended(
    tmp_path, disk, fault, world, mode
):
    recipe, processes = begin(tmp_path, disk, world, mode)
    checkpoints = disk.folder / "run" / "checkpoints"
    disk.fill() if fault == "full" else disk.protect(checkpoints)
    assert finish(processes, timeout=200) == [5] * world
    assert "are lost, the newest intact checkpoint is" in complaints(recipe)
    found = find_checkpoint(disk.folder / "run")
    assert found.manifest.step < STEPS
    assert found.skipped == []
    disk.empty() if fault == "full" else disk.unprotect(checkpoints)
    assert_resumes_like_the_reference(tmp_path, disk, recipe, world, mode)


def test_a_run_survives_a_disk_that_is_full_for_a_while(tmp_path, disk):
    """A save or two fail; the next finds room again, and nothing is missing at the end."""
    _, (process,) = begin(tmp_path, disk, 1, "sync")
    metrics = disk.folder / "run" / "metrics.jsonl"
    os.kill(process.pid, signal.SIGSTOP)
    disk.fill(left=100_000)  # room for rows, not for a checkpoint
    lines = metrics.read_bytes().count(b"\n")
    newest = find_checkpoint(disk.folder / "run").manifest.step
    os.kill(process.pid, signal.SIGCONT)
    wait_for_lines(metrics, lines + 4, [process])
    os.kill(process.pid, signal.SIGSTOP)
    assert find_checkpoint(disk.folder / "run").manifest.step == newest, "no save failed"
    disk.empty()
    os.kill(process.pid, signal.SIGCONT)
    assert finish([process], timeout=200) == [0]
    assert examine(disk.folder / "run").state == "finished"
    reference = write_recipe(tmp_path / "reference", STEPS)
    assert finish(start(reference), timeout=200) == [0]
    assert_same_run(disk.folder, tmp_path / "reference")


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_run_does_not_start_on_a_bad_disk(tmp_path, disk, fault):
    recipe = write_recipe(tmp_path / "run", STEPS)
    (disk.folder / "run").mkdir()
    disk.fill() if fault == "full" else disk.protect(disk.folder / "run")
    assert finish(start(recipe, 1, 0, settings_of(disk, "sync"))) == [3]
    assert "cannot write in the run directory" in complaints(recipe)
    if fault == "read-only":
        disk.unprotect(disk.folder / "run")
