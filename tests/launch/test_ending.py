from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import atexit, sys
from trainer.engine.launch.ending import end_process, skip_teardown
class Late:
    def __del__(self):
        print("torn down")
kept = [Late()]
atexit.register(print, "exit handler")
if sys.argv[1] == "skip":
    skip_teardown()
print("printed, not flushed")
end_process(7)
"""


@pytest.mark.parametrize("word", ["skip", "keep"])
def test_handlers_run_and_output_is_flushed_with_and_without_teardown(word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, word],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        capture_output=True,
        text=True,
    )
    lines = ["printed, not flushed", "exit handler", *["torn down"] * (word == "keep")]
    assert (done.returncode, done.stdout.splitlines()) == (7, lines)
