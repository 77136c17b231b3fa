"""Heartbeats, and what happens when a rank makes no progress. Each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.engine.core.heartbeat import BeatFile, heartbeat, read_beats

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, sys, time, threading
from pathlib import Path
from trainer.engine.core.heartbeat import heartbeat
from trainer.engine.launch.environment import World
from trainer.engine.launch.rank_log import open_rank_log
from trainer.engine.launch.watchdog import Watchdog
folder = Path(sys.argv[1]) / "logs"
def run(rank, size, limit, work):
    world = World(rank, size, rank, size, launcher="torchrun")
    with open_rank_log(folder, rank) as log, Watchdog(log, world, limit, reasons.append):
        work()
reasons = []
def steps():
    for step in range(1, 4):
        heartbeat.begin_step(step)
def sleep_in_forward(seconds=60):
    steps()
    with heartbeat.phase("forward"):
        time.sleep(seconds)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, folder],
        env={**environ, "PYTHONPATH": str(ROOT / ".dev")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def log(folder: Path, rank: int = 0) -> str:
    return (folder / "logs" / f"rank-{rank}.log").read_text("utf-8")


def test_a_rank_that_hangs_is_named_with_its_phase_and_its_stacks(tmp_path: Path) -> None:
    code, _, err = finish(start("run(1, 2, 1.0, sleep_in_forward)", tmp_path))
    assert code == 1
    assert "error: the job hangs: rank 1 (process" in err
    assert "last seen in step 3, forward, no progress for" in err
    assert "in sleep_in_forward" in log(tmp_path, 1)
    (beat,) = read_beats(tmp_path / "logs")
    assert (beat.rank, beat.ended) == (1, "hang")


def test_a_single_process_is_warned_about_and_goes_on(tmp_path: Path) -> None:
    code, _, err = finish(start("run(0, 1, 0.3, lambda: sleep_in_forward(2))", tmp_path))
    assert code == 0
    assert err.count("warning: no progress for 0.3 s in step 3, forward") == 1
    assert "in sleep_in_forward" in log(tmp_path)


SAVES = """
def saves():
    for _ in range(20):
        heartbeat.touch()
        time.sleep(0.1)
saver = threading.Thread(target=saves)
"""
LONG = [
    "time.sleep(2)",  # before the first step: assembling, tokenising, compiling
    "steps()\nheartbeat.enter('export')\ntime.sleep(2)",
    "steps()\nfor _ in range(20):\n    heartbeat.touch()\n    time.sleep(0.1)",
    "steps()\nheartbeat.enter('checkpoint')\nsaver.start()\nsaver.join()",
]


def test_progress_and_what_may_take_long_is_no_hang(tmp_path: Path) -> None:
    folders, processes = [tmp_path / str(index) for index in range(len(LONG))], []
    for work, folder in zip(LONG, folders, strict=True):
        folder.mkdir()
        body = "\n".join(f"    {line}" for line in work.splitlines())
        processes.append(start(f"{SAVES}\ndef work():\n{body}\nrun(0, 2, 1.0, work)", folder))
    for work, folder, process in zip(LONG, folders, processes, strict=True):
        code, _, err = finish(process)
        assert (code, err) == (0, ""), work
        assert "no progress" not in log(folder), work


def test_a_process_that_was_suspended_does_not_hang(tmp_path: Path) -> None:
    process = start(
        "print('go', flush=True)\nrun(0, 2, 20.0, lambda: sleep_in_forward(3))", tmp_path
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    assert finish(process)[0] == 0


def test_a_rank_that_holds_pythons_lock_leaves_its_stacks(tmp_path: Path) -> None:
    """`ctypes.PyDLL` keeps the lock while C sleeps, so that no Python thread runs."""
    code = """
import ctypes
def work():
    steps()
    hold_the_lock()
def hold_the_lock():
    ctypes.PyDLL(None).sleep(4)
run(0, 1, 1.0, work)
"""
    assert finish(start(code, tmp_path))[0] == 0
    assert "in hold_the_lock" in log(tmp_path)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE"])
def test_a_crash_leaves_the_stacks_in_the_log(tmp_path: Path, name: str) -> None:
    code = (
        f"import signal\ndef crash():\n    os.kill(os.getpid(), signal.{name})\nrun(0, 1, 9, crash)"
    )
    assert finish(start(code, tmp_path))[0] == -signal.Signals[name]
    assert "Fatal Python error" in log(tmp_path)
    assert "in crash" in log(tmp_path)


def test_an_error_leaves_its_traceback_without_secrets(tmp_path: Path) -> None:
    code = """
def fail():
    raise ValueError("cannot reach https://me:mySecret@host/x")
try:
    run(0, 1, 9, fail)
except ValueError as error:
    print(error.__notes__)
"""
    code_, out, _ = finish(start(code, tmp_path))
    assert code_ == 0
    assert f"the traceback is in {tmp_path}/logs/rank-0.log" in out
    assert "ValueError in start\nTraceback (most recent call last):" in log(tmp_path)
    assert "mySecret" not in log(tmp_path)
    assert "mySecret" not in (tmp_path / "logs" / "heartbeat-0.json").read_text()
    (beat,) = read_beats(tmp_path / "logs")
    assert beat.ended == "error"
    assert beat.reason.startswith("ValueError: cannot reach")


def test_links_are_not_followed_and_damaged_reports_are_left_out(tmp_path: Path) -> None:
    heartbeat.begin(0)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "heartbeat-0.json").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"):
        BeatFile(tmp_path, 0, 0, 1.0)
    BeatFile(tmp_path, 1, 0, 1.0).end(None)
    (tmp_path / "heartbeat-2.json").write_text("{")
    (tmp_path / "heartbeat-3.json").write_text(
        (tmp_path / "heartbeat-1.json").read_text() + "x" * 9
    )
    os.mkfifo(tmp_path / "heartbeat-4.json")
    text = (tmp_path / "heartbeat-1.json").read_text().replace("start", "\\u001b[2J")
    (tmp_path / "heartbeat-5.json").write_text(text)
    assert [beat.rank for beat in read_beats(tmp_path)] == [1]
    assert (tmp_path / "victim").read_text() == "precious"
