"""Several training processes that take turns, one optimizer step each.

A machine's speed drifts: other processes, clocks, caches. Processes that run one after the other
are measured on different machines, so to speak. Here every baseline waits, without using the
processor, until the coordinator grants it one step; a round grants one to each, and what is
compared are steps of the same round.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

GRANTS, REPORTS = "BENCHMARK_GRANTS_FD", "BENCHMARK_REPORTS_FD"
START_TIMEOUT_SECONDS = 600
STEP_TIMEOUT_SECONDS = 300


class Turn:
    """A baseline's side: call `step_done` at the end of each optimizer step."""

    def __init__(self) -> None:
        self._grants = int(os.environ[GRANTS])
        self._reports = int(os.environ[REPORTS])
        self._start()

    def _start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step_done(self) -> None:
        """Report the step and wait for the next grant; does not return after the last one."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = peak if sys.platform == "darwin" else peak * 1024
        report = {"cpu": cpu, "wall": wall, "peak_bytes": peak_bytes}
        os.write(self._reports, json.dumps(report).encode() + b"\n")
        if not os.read(self._grants, 1):
            os._exit(0)  # whatever a framework does at its end is not part of a step
        self._start()


@dataclass
class Baseline:
    """The coordinator's side of one process."""

    name: str
    command: Sequence[str]
    log: Path
    cpu: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def start(self, environment: dict[str, str]) -> None:
        """Start it and wait until its first step, with all compilation, is done.

        Raises:
            BaselineError: it ended or hung before.
        """
        grants, self._grants = os.pipe()
        self._reports, reports = os.pipe()
        environment = {**environment, GRANTS: str(grants), REPORTS: str(reports)}
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=environment,
                pass_fds=(grants, reports),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
            )
        os.close(grants)
        os.close(reports)
        self._read_report(START_TIMEOUT_SECONDS)

    def step(self) -> None:
        """Let it do one step.

        Raises:
            BaselineError: it ended or hung.
        """
        os.write(self._grants, b"1")
        report = self._read_report(STEP_TIMEOUT_SECONDS)
        self.cpu.append(report["cpu"])
        self.peak_bytes = int(report["peak_bytes"])

    def stop(self) -> None:
        """End it."""
        os.close(self._grants)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._reports)

    def _read_report(self, timeout: float) -> dict[str, float]:
        ready, _, _ = select.select([self._reports], [], [], timeout)
        line = os.read(self._reports, 4096) if ready else b""
        if not line:
            self._process.kill()
            end = f"ended with {self._process.wait()}" if ready else f"no step in {timeout} s"
            output = self.log.read_text(errors="replace").strip()
            raise BaselineError(f"{self.name}: {end}\n{output[-1500:]}")
        report: dict[str, float] = json.loads(line)
        return report


class BaselineError(Exception):
    """A baseline ended or hung; the message is the end of its output."""


def take_turns(baselines: Sequence[Baseline], *, warmup: int, rounds: int) -> None:
    """Run rounds of one step each; the first `warmup` are forgotten."""
    for number in range(warmup + rounds):
        for baseline in baselines:
            baseline.step()
            if number < warmup:
                baseline.cpu.clear()
