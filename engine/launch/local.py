"""Start the ranks of a job on this machine, pass signals on, and leave nothing behind. Torch-free.

Each rank is a process in a session of its own: a terminal's Ctrl-C reaches this parent alone, which
passes it on once. The kernel kills the ranks when the parent dies (Linux).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from ..core.errors import EnvironmentFault, ExitCode
from ..core.heartbeat import read_beats
from .child import preparation, rank_environment, store_file
from .environment import ATTEMPT, STORE, TRACEBACK
from .failure import Cause, RankEnd, Restarts, find_cause
from .rank_log import STACKS_SIGNAL
from .signals import ECHO_SECONDS, STOP_SIGNALS, URGENT

SETTLE_SECONDS = 1.0
GRACE_SECONDS = 5.0


def launch(
    command: Sequence[str],
    nproc: int,
    *,
    log_dir: Path,
    stop_timeout_seconds: float = 120.0,
    restarts: Restarts | None = None,
    signals: Signals | None = None,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> int:
    """Run `nproc` ranks of a command until all have ended; return the exit code of the job.

    The first of SIGTERM, SIGINT, SIGHUP and SIGUSR1 is passed on to all ranks; they are killed
    after `stop_timeout_seconds`, and at once by a second SIGINT. When one rank fails, the others
    are ended within seconds.

    Args:
        command: what each rank runs; it finds its rank with `environment.find_world`.
        nproc: how many ranks.
        log_dir: output of ranks other than 0 is appended to `rank-N.log` there.
        stop_timeout_seconds: how long ranks may take to save after a signal.
        restarts: how a job that died of something unforeseen is started again; None: it is not.
        signals: of a caller that listens to them already.
        on_failure: called with the sentence that says which rank failed and how.

    Returns:
        0 if all ranks returned 0; 75 if they stopped with a checkpoint; 130 if they were killed
        while stopping; else the code of the rank that failed first.

    Raises:
        EnvironmentFault: a process or a log file cannot be made.
    """
    restarts = restarts or Restarts(0)
    with nullcontext(signals) if signals else Signals() as heard:
        attempt = 0
        while True:
            job = _Job(nproc, stop_timeout_seconds, heard)
            code = job.run([*command, *restarts.arguments()], log_dir, attempt)
            if job.cause:
                on_failure(job.cause.sentence)
            if code != ExitCode.FAILED or heard.first or not restarts.allow():
                return code
            attempt += 1
            _say(f"starting the ranks again ({restarts.count} of at most {restarts.limit} times)")


class Signals:
    """Queues signals in a pipe, so that they never interrupt what the parent is doing.

    Attributes:
        first: the first signal that asked to stop, 0 before.
    """

    def __init__(self) -> None:
        self.first = 0
        self._urgent_at = 0.0

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, _noop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self, seconds: float) -> list[int]:
        """Return the signals that came, after `seconds` or when the first comes."""
        select.select([self._read_end], [], [], max(0.0, seconds))
        with suppress(BlockingIOError):
            return list(os.read(self._read_end, 4096))
        return []

    def judge(self, number: int) -> Literal["pass on", "kill", "ignore"]:
        """Return what a signal asks for: the first that is urgent ends the patience for SIGINT."""
        if number not in STOP_SIGNALS:
            return "ignore"
        self.first = self.first or number
        now = time.monotonic()
        if number not in URGENT:
            return "pass on"
        if not self._urgent_at:
            self._urgent_at = now
            return "pass on"
        impatient = number == signal.SIGINT and now - self._urgent_at > ECHO_SECONDS
        return "kill" if impatient else "ignore"


def _noop(number: int, frame: FrameType | None) -> None:
    """Exist, so that the signal reaches the wakeup descriptor."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    code: int | None = None
    is_struck: bool = False
    """whether we asked it to end, or made it"""


class _Job:
    """One attempt: all ranks, from start to end.

    Attributes:
        cause: why it failed.
    """

    def __init__(self, nproc: int, stop_timeout_seconds: float, signals: Signals) -> None:
        self._nproc = nproc
        self._stop_timeout_seconds = stop_timeout_seconds
        self._signals = signals
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []
        """those that ended by themselves, in the order in which that was noticed"""
        self._blows: list[tuple[float, int]] = []
        """when the ranks that still run get which signal"""
        self.cause: Cause | None = None

    def run(self, command: Sequence[str], log_dir: Path, attempt: int) -> int:
        """Start the ranks, wait for their ends, and return the job's exit code."""
        try:
            with store_file() as (store, descriptors):
                environ = {**os.environ, STORE: store, ATTEMPT: str(attempt)}
                self._start(command, log_dir, environ, descriptors)
                self._wait()
        except OSError as error:
            raise EnvironmentFault(f"cannot run {self._nproc} processes: {error}") from error
        finally:
            for rank in self._ranks:
                _kill_group(rank.process)
                rank.process.wait()
        return self._exit_code(log_dir)

    def _wait(self) -> None:
        while self._running():
            until = self._blows[0][0] if self._blows else time.monotonic() + 60.0
            for number in self._signals.wait(until - time.monotonic()):
                self._heed(number)
            self._reap()
            self._strike()

    def _start(
        self,
        command: Sequence[str],
        log_dir: Path,
        environ: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        prepare = preparation(command)
        for number in range(self._nproc):
            log = log_dir / f"rank-{number}.log"
            log_start = log.stat().st_size if log.exists() else 0
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = os.open(log, flags, 0o644) if number else None
            # A signal between fork and exec would run our handler in the child.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                process = subprocess.Popen(
                    command,
                    env=rank_environment(environ, number, self._nproc),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=prepare,
                    pass_fds=descriptors,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
                if output is not None:
                    os.close(output)
            self._ranks.append(_Rank(number, process, log, log_start))

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _heed(self, number: int) -> None:
        action = self._signals.judge(number)
        if action == "kill":
            self._blows = [(0.0, signal.SIGKILL)]
        elif action == "pass on":
            for rank in self._running():
                rank.process.send_signal(number)
            deadline = time.monotonic() + self._stop_timeout_seconds
            self._blows = self._blows or [(deadline, signal.SIGKILL)]

    def _reap(self) -> None:
        """Take note of the ranks that ended; the first failure dooms the others."""
        for rank in self._running():
            rank.code = rank.process.poll()
            if rank.code is None:
                continue
            _kill_group(rank.process)  # what it left behind: data workers
            if rank.is_struck or rank.code in (ExitCode.DONE, ExitCode.STOPPED_AND_SAVED):
                continue
            if not self._failed:
                end = time.monotonic() + SETTLE_SECONDS
                # Whoever runs on for so long may hang: its stacks say where.
                doom = [(end, STACKS_SIGNAL), (end + 0.1, signal.SIGTERM)]
                doom.append((end + GRACE_SECONDS, signal.SIGKILL))
                self._blows = sorted([*self._blows, *doom])
            self._failed.append(rank)

    def _strike(self) -> None:
        while self._blows and self._blows[0][0] <= time.monotonic():
            _, number = self._blows.pop(0)
            for rank in self._running():
                rank.is_struck |= number != STACKS_SIGNAL
                if number == signal.SIGKILL:
                    _kill_group(rank.process)
                else:
                    rank.process.send_signal(number)

    def _exit_code(self, log_dir: Path) -> int:
        codes = [rank.code for rank in self._ranks]
        if not self._failed:
            if any(code not in (ExitCode.DONE, ExitCode.STOPPED_AND_SAVED) for code in codes):
                return ExitCode.INTERRUPTED  # they did not stop in time
            stopped = ExitCode.STOPPED_AND_SAVED in codes
            return ExitCode.STOPPED_AND_SAVED if stopped else ExitCode.DONE
        beats = {
            beat.rank: beat
            for beat in read_beats(log_dir)
            if beat.rank < self._nproc and beat.pid == self._ranks[beat.rank].process.pid
        }
        ends = [
            RankEnd(rank.number, rank.code or 0, rank.log, rank.log_start, beats.get(rank.number))
            for rank in self._failed
        ]
        cause = find_cause(ends, list(beats.values()), whole_tail=TRACEBACK in os.environ)
        end = next((end.code for end in ends if end.number == cause.rank), cause.code)
        if self._signals.first and (-end in STOP_SIGNALS or end == ExitCode.INTERRUPTED):
            return ExitCode.INTERRUPTED
        self.cause = cause
        if cause.code != codes[0] or cause.code == ExitCode.FAILED:
            _say(cause.render())
        return cause.code


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"trainer: {text}", file=sys.stderr, flush=True)
