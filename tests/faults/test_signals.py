"""Seventy-two signals: each kind in every phase of a run, on one rank and on two.

The quick part, tests/train/test_stops.py, compares resumed runs with uninterrupted ones as well.
"""

import signal

import pytest

from tests.train.processes import finish, start, write_recipe
from tests.train.test_stops import SETTINGS, STEPS, little_patience, stop_at
from trainer.engine.report.status import examine

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The fault that makes the phase long, and the exit code that follows from what is saved by then.
PHASES = {
    "the first batch": ("data.read:step1:sleep60", 130),
    "the first step": ("train.step:step1:sleep60", 130),
    "the first step, in C++": ("train.step:step1:block60", 130),
    "a later step": ("train.step:step3:x1:sleep2", 75),
    "a later batch": ("data.read:step3:x1:sleep2", 75),
    "a save": ("checkpoint.before_write:step3:x1:sleep2", 75),
    "an evaluation": ("train.evaluate:x2:sleep2", 75),
    "the last save": (f"checkpoint.before_write:step{STEPS}:x1:sleep2", 0),
    "an export": ("train.export:sleep60", 75),
}


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_any_phase_ends_as_the_contract_says(tmp_path, phase, number, world):
    recipe = write_recipe(tmp_path / "run", STEPS)
    fault, expected = PHASES[phase]
    settings = ["checkpoint.export=hf"] if phase == "an export" else []
    marks = 1 if phase == "an export" else world
    in_c = "C++" in phase
    options = {"before": little_patience if in_c else None, "number": number}
    assert stop_at(recipe, fault, world, marks, settings, **options) == [expected] * world
    state = examine(tmp_path / "run" / "run").state
    assert state == ("finished" if expected == 0 else "stopped")
    again = finish(start(recipe, world, attempt=1, overrides=[*SETTINGS, *settings]))
    assert again == [0] * world
    assert examine(tmp_path / "run" / "run").state == "finished"
