"""A run that is killed at any one operation on its directory equals one that was left alone.

Python announces each file that is opened, renamed, linked or removed (PEP 578), before it happens.
One attempt is killed at the Nth announcement or row, the next one finishes: rows, results, aliases
and checkpoints must then be those of a run that was never killed.
"""

import json
import os
import signal
import sys

import pytest

from tests.commands import run_here
from tests.distributed import CONTEXT
from tests.federated.conftest import PLAIN
from trainer.engine.checkpoint.manifest import read_manifest

FEDERATED = """\
[federation]
clients = 2
rounds = 2
local_steps = 2
[federation.server]
name = "fednesterov"
"""
COMMANDS = {
    "run": ["run", "recipe.toml", "--set=run.steps=4", "--set=checkpoint.interval=2"],
    "federate": ["federate", "run", "recipe.toml"],
}
SETTINGS = ["--set=evaluate.interval=2", "--set=evaluate.steps=1", "--set=metrics.interval=1",
            "--set=checkpoint.keep=1", "--set=checkpoint.keep_best=true",
            "--set=checkpoint.mode=sync"]  # fmt: skip
OPERATIONS = ("os.rename", "os.remove", "os.symlink", "os.mkdir", "os.rmdir")
WRITES = os.O_WRONLY | os.O_RDWR


class Countdown:
    """Kills this process at its Nth operation on a run directory, and names those before it.

    Args:
        last: number of the operation, counted from 1; 0: none.
        trace: gets the name of each operation.
    """

    def __init__(self, last, trace):
        self.last, self.passed = last, 0
        self.trace = trace.open("w", buffering=1)
        self.write = os.write
        sys.addaudithook(self.hear)
        os.write = self.write_row

    def count(self, name):
        self.passed += 1
        print(name, file=self.trace)
        if self.passed == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(self, event, arguments):
        if event in OPERATIONS:
            self.count(f"{event} {arguments[0]}")
        elif event == "open" and "runs" in str(arguments[0]) and (arguments[2] or 0) & WRITES:
            self.count(f"open {arguments[0]}")

    def write_row(self, file, data):
        if not bytes(data).startswith(b'{"kind"'):
            return self.write(file, data)
        self.count(f"before {bytes(data)[:40].decode()}")
        self.write(file, data[:9])
        self.count("within the row")
        count = 9 + self.write(file, data[9:])
        self.count("after the row")
        return count


def start_and_kill(folder, words, last):
    null = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.dont_write_bytecode = True  # else the first run of new code has operations of its own
    Countdown(last, folder / "trace")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    os._exit(run_here(["trainer", *words], folder, environ, [*null, log]))


def attempt(folder, words, last=0):
    """Run the recipe until its Nth operation, and return the exit code."""
    process = CONTEXT.Process(target=start_and_kill, args=(folder, words, last))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def describe(run):
    """Return what a finished run leaves, without what depends on the machine or the attempt."""
    lines = (run / "metrics.jsonl").read_text().split("\n")
    assert lines.pop() == ""
    found = []
    for row in map(json.loads, lines):
        found.append({key: row[key] for key in row if "second" not in key and key[:4] != "time"})
        for key in ("memory_bytes", "data_wait", "mfu"):
            found[-1].pop(key, None)
    checkpoints = {}
    for path in (run / "checkpoints").iterdir():
        files = {} if path.is_symlink() else read_manifest(path).files
        checkpoints[path.name] = os.readlink(path) if path.is_symlink() else files
    for files in checkpoints.values():
        if isinstance(files, dict):
            files.pop("manifest.json", None)
    return {
        "rows": found,
        "results": json.loads((run / "results.json").read_text()),
        "outcome": json.loads((run / "state.json").read_text())["outcome"],
        "checkpoints": checkpoints,
        "temporary": [path.name for path in run.rglob("*") if ".tmp" in path.name],
    }


@pytest.fixture(params=COMMANDS)
def reference(request, tmp_path):
    """The words of a run, what it leaves when it is left alone, and its operations."""
    words = [*COMMANDS[request.param], *SETTINGS]
    whole = start_folder(tmp_path / "whole", request.param)
    assert attempt(whole, words) == 0, (whole / "log").read_text()
    operations = (whole / "trace").read_text().splitlines()
    return request.param, words, describe(whole / "runs" / "r"), operations


def start_folder(folder, kind):
    folder.mkdir()
    text = PLAIN + (FEDERATED if kind == "federate" else "")
    (folder / "recipe.toml").write_text(text)
    return folder


def check_kill(tmp_path, reference, number, times):
    """Kill a run at an operation, so many times in a row, and compare it."""
    kind, words, expected, operations = reference
    folder = start_folder(tmp_path / f"{number}", kind)
    codes = [attempt(folder, words, number) for _ in range(times)]
    assert codes[0] == -signal.SIGKILL
    assert attempt(folder, words) == 0, (folder / "log").read_text()
    assert describe(folder / "runs" / "r") == expected, operations[number - 1]


def test_a_kill_around_the_first_and_the_last_save_changes_nothing(tmp_path, reference):
    operations = reference[3]
    rows = [number for number, name in enumerate(operations, 1) if name == "after the row"]
    renames = [
        number
        for number, name in enumerate(operations, 1)
        if name.startswith("os.rename") and ".tmp-step" in name
    ]
    check_kill(tmp_path, reference, rows[0], 2)
    for number in (renames[0], renames[-1] + 2):  # at its rename, and before its aliases
        check_kill(tmp_path, reference, number, 1)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_kill_at_every_fifth_operation_changes_nothing(tmp_path, reference):
    for number in range(1, len(reference[3]) + 1, 5):
        check_kill(tmp_path, reference, number, 1)
