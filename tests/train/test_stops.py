"""A signal is heeded in every phase of a run, by all ranks alike, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainer
from tests.cases import also
from tests.train.processes import finish, rows, start, tensors, wait_for_lines, write_recipe
from trainer.engine.core.run_state import read_state
from trainer.engine.launch import signals
from trainer.engine.report.status import examine
from trainer.engine.sources import documents as parts

ROOT = Path(trainer.__file__).absolute().parents[1]
STEPS = 6
SETTINGS = ["checkpoint.interval=3", "evaluate.interval=3"]
WITHIN_SECONDS = 30


def little_patience():
    signals.GRACE_SECONDS = 1.0


def small_parts():
    parts.PART_BYTES = 1


def wait_for_marks(folder, count, processes):
    """Return when so many processes have come to the fault."""
    while len(list(folder.iterdir())) < count:
        assert all(process.exitcode is None for process in processes), "ended before the fault"
        time.sleep(0.02)


def stop_at(recipe, fault, world=1, marks=1, settings=(), number=signal.SIGTERM, **options):
    """Run until the fault, signal the last rank alone, and return the codes of all."""
    folder = recipe.parent / f"marks-{time.monotonic_ns()}"
    folder.mkdir()
    settings = [*SETTINGS, *settings]
    processes = start(recipe, world, overrides=settings, fault=fault, marks=folder, **options)
    wait_for_marks(folder, marks, processes)
    asked = time.monotonic()
    os.kill(processes[-1].pid, number)
    codes = finish(processes, WITHIN_SECONDS)
    assert time.monotonic() - asked < WITHIN_SECONDS
    return codes


def text_corpus(folder):
    """Return settings with a source of two parts that must be tokenised."""
    (folder / "corpus").mkdir()
    for part in ("a", "b"):
        (folder / "corpus" / f"{part}.txt").write_text("some text to learn from. " * 900)
    source = f'data.sources=[{{name = "text", path = "{folder / "corpus"}"}}]'
    return [source, f"data.cache_dir={folder / 'cache'}"]


NEW = {
    "the first step": "train.step:step1:sleep60",
    "the first step, in C++": "train.step:step1:block60",
    "the first batch": "data.read:step1:sleep60",
}


@pytest.mark.parametrize("world", [1, *also(2)])
@pytest.mark.parametrize("phase", NEW)
def test_before_the_first_step_is_done_nothing_was_saved(tmp_path, phase, world):
    recipe = write_recipe(tmp_path / "run", STEPS)
    codes = stop_at(recipe, NEW[phase], world, marks=world, before=little_patience)
    assert codes == [130] * world
    assert list((tmp_path / "run" / "run" / "checkpoints").iterdir()) == []
    assert read_state(tmp_path / "run" / "run").outcome == "stopped"
    assert finish(start(recipe, world, attempt=1)) == [0] * world


@pytest.mark.parametrize("world", [1, *also(2)])
@pytest.mark.parametrize("processes", [2, *also(1)])
def test_tokenising_stops_with_its_processes(tmp_path, world, processes):
    recipe = write_recipe(tmp_path / "run", STEPS)
    settings, before = text_corpus(tmp_path), small_parts if processes > 1 else None
    fault = "data.tokenise:sleep60"
    codes = stop_at(recipe, fault, world, processes, settings, before=before)
    assert codes == [130] * world
    assert examine(tmp_path / "run" / "run").state == "stopped"
    assert finish(start(recipe, world, 1, overrides=settings)) == [0] * world


RESUMED = {
    "reading the checkpoint": "checkpoint.read:step6:sleep60",
    "the first step": "train.step:step7:sleep60",
    "the first step, in C++": "train.step:step7:block60",
}


@pytest.mark.parametrize("world", [1, *also(2)])
@pytest.mark.parametrize("phase", RESUMED)
def test_before_the_first_step_of_a_resumed_run_its_checkpoint_stands(tmp_path, phase, world):
    recipe = write_recipe(tmp_path / "run", STEPS)
    assert finish(start(recipe, world, overrides=SETTINGS)) == [0] * world
    longer = ["run.steps=9"]
    allowed = {"allow_changed": ["run.steps"], "attempt": 1}
    before = little_patience
    codes = stop_at(recipe, RESUMED[phase], world, world, longer, before=before, **allowed)
    assert codes == [75] * world
    assert examine(tmp_path / "run" / "run").checkpoint_step == 6


def reference(folder, world):
    """Return the rows of a run without interruption, and its last state."""
    recipe = write_recipe(folder, STEPS)
    assert finish(start(recipe, world, overrides=SETTINGS)) == [0] * world
    return curves(folder), tensors(folder)[1]


def curves(folder):
    kinds = {"train": ("step", "loss", "grad_norm"), "eval": ("step", "loss")}
    return {
        kind: [[row[key] for key in keys] for row in rows(folder, kind)]
        for kind, keys in kinds.items()
    }


@pytest.mark.parametrize(
    ("world", "fault", "step"),
    [
        (1, "train.evaluate:x2:sleep2", 3),
        *also((2, "train.evaluate:x2:sleep2", 3), (2, "train.evaluate:x4:sleep2", 6)),
    ],
)
def test_an_evaluation_is_given_up_and_done_when_the_run_resumes(tmp_path, world, fault, step):
    expected, state = reference(tmp_path / "reference", world)
    recipe = write_recipe(tmp_path / "run", STEPS)
    marks, settings = world, []
    if step == STEPS:
        settings = [f"evaluate.interval={STEPS}"]
        expected["eval"] = expected["eval"][-1:]
    assert stop_at(recipe, fault, world, marks, settings) == [75] * world
    assert tensors(tmp_path / "run")[0] == step
    assert curves(tmp_path / "run")["eval"] == []
    again = [*SETTINGS, *settings]
    assert finish(start(recipe, world, attempt=1, overrides=again)) == [0] * world
    assert curves(tmp_path / "run") == expected
    final = tensors(tmp_path / "run")[1]
    assert all(final[name].equal(tensor) for name, tensor in state.items())


@pytest.mark.parametrize("world", [1, *also(2)])
def test_a_hanging_data_worker_does_not_keep_a_run_from_saving(tmp_path, world):
    expected, _ = reference(tmp_path / "reference", world)
    recipe = write_recipe(tmp_path / "run", STEPS)
    fault = "data.read:rank0:step5:sleep600"  # and the signal comes to the other rank
    settings = ["data.workers=1", "metrics.interval=1"]
    folder = tmp_path / "run"
    processes = start(recipe, world, overrides=[*SETTINGS, *settings], fault=fault)
    wait_for_lines(folder / "run" / "metrics.jsonl", 5, processes)  # 4 steps, 1 evaluation
    os.kill(processes[-1].pid, signal.SIGTERM)
    assert finish(processes, WITHIN_SECONDS) == [75] * world
    assert tensors(folder)[0] == 4
    assert finish(start(recipe, world, attempt=1, overrides=SETTINGS)) == [0] * world
    assert curves(folder) == expected


def test_an_export_is_given_up_and_done_by_the_next_run(tmp_path):
    recipe = write_recipe(tmp_path / "run", STEPS)
    settings = ["checkpoint.export=hf"]
    assert stop_at(recipe, "train.export:sleep60", settings=settings) == [75]
    assert tensors(tmp_path / "run")[0] == STEPS
    assert examine(tmp_path / "run" / "run").state == "stopped"
    assert finish(start(recipe, overrides=[*SETTINGS, *settings])) == [0]
    assert (tmp_path / "run" / "run" / "hf" / "config.json").exists()
    assert examine(tmp_path / "run" / "run").state == "finished"


@pytest.mark.parametrize("world", [1, *also(2)])
def test_a_signal_in_the_last_save_waits_for_it(tmp_path, world):
    recipe = write_recipe(tmp_path / "run", STEPS)
    fault = f"checkpoint.before_write:step{STEPS}:sleep2"
    assert stop_at(recipe, fault, world, world) == [0] * world
    assert examine(tmp_path / "run" / "run").state == "finished"


class Command:
    """`trainer run` in a session of its own."""

    def __init__(self, recipe, *options, fault=""):
        self.marks = recipe.parent / f"marks-{time.monotonic_ns()}"
        self.marks.mkdir()
        fault = {"TRAINER_FAULT": fault, "TRAINER_FAULT_MARKS": str(self.marks)} if fault else {}
        settings = [f"--set={text}" for text in SETTINGS]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer", "run", str(recipe), *settings, *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **fault},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, marks):
        while len(list(self.marks.iterdir())) < marks:
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)

    def wait_until_signals_wait(self):
        """Wait until the command blocks the signals that stop a run, or handles them already."""
        bit = 1 << (signal.SIGUSR1 - 1)
        while True:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            masks = dict(line.split(":\t") for line in status.splitlines() if line[:3] == "Sig")
            if (int(masks["SigBlk"], 16) | int(masks["SigCgt"], 16)) & bit:
                return
            time.sleep(0.01)

    def stop(self, number=signal.SIGTERM):
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=WITHIN_SECONDS)
        return self.process.returncode


@pytest.mark.parametrize("options", [(), *also((("--nproc", "2"),))], ids=["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, *also(signal.SIGINT, signal.SIGTERM)])
def test_a_run_that_starts_up_answers_with_our_code(tmp_path, number, options):
    recipe = write_recipe(tmp_path / "run", STEPS)
    command = Command(recipe, *options, fault="run.import:sleep60")
    command.wait_for(len(options) or 1)
    assert command.stop(number) == 130
    command = Command(recipe, *options)
    command.wait_until_signals_wait()
    assert command.stop(number) == 130
