"""The stop flag in real processes, and the agreement of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from trainer.engine.launch.group import RankPeers
from trainer.engine.launch.signals import StopFlag

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, signal, sys, threading, time
from trainer.engine.launch.signals import StopFlag
def wait(stop):
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.005)
    print(stop.reason, flush=True)
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_the_first_signal_asks(name: str) -> None:
    process = start("with StopFlag() as stop: wait(stop)\nsys.exit(75)")
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, f"{name}\n")
    assert name in err


def test_the_second_ends_at_once_even_where_python_code_does_not_run() -> None:
    """The main thread waits in C, as in a collective whose peers are gone."""
    process = start(
        "lock = threading.Lock(); lock.acquire()\n"
        "with StopFlag() as stop: wait(stop); lock.acquire()"
    )
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGINT\n"
    time.sleep(0.15)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130


def test_an_echo_or_a_signal_after_a_warning_does_not_end() -> None:
    process = start("with StopFlag() as stop: wait(stop); time.sleep(0.5)\nsys.exit(75)")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 75


def test_a_forked_worker_neither_reports_signals_nor_dies_of_an_interrupt() -> None:
    process = start(
        "with StopFlag() as stop:\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(0.5); os._exit(7)\n"
        "    time.sleep(0.1)\n"
        "    os.kill(child, signal.SIGINT); time.sleep(0.2); os.kill(child, signal.SIGINT)\n"
        "    print('ready', flush=True)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print(code, stop.requested)"
    )
    assert process.communicate(timeout=60)[0] == "7 False\n"


def test_the_handlers_found_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopFlag() as stop:
        assert signal.getsignal(signal.SIGINT) not in before
        assert not stop.agree()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def stop_one_rank() -> list[bool]:
    import torch.distributed as dist

    group = dist.group.WORLD
    with StopFlag() as stop:
        peers = RankPeers(group)
        stop.join(peers)
        first = stop.agree()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.requested:
                time.sleep(0.005)
        return [first, stop.agree(), peers.any(dist.get_rank() == 0), peers.any(False)]


def test_all_ranks_agree_when_one_was_asked() -> None:
    assert run_ranks(2, stop_one_rank) == [[False, True, True, False]] * 2
