"""Start the ranks of a job on this machine, and pass signals to them. Torch-free.

Each rank is a process in a session of its own: a terminal's Ctrl-C reaches this parent alone, which
passes it on once. The kernel kills the ranks when the parent dies (Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import EnvironmentFault, ExitCode
from ..core.heartbeat import read_beats
from .child import create_store_file, make_preexec_function, rank_environment
from .ending import STOP_SIGNALS, SignalPipe, print_error
from .environment import ATTEMPT, STORE, TRACEBACK
from .failure import Cause, RankEnd, Restarts, find_cause
from .rank_log import STACKS_SIGNAL

LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)
"""the signals that a launcher listens to; SIGCHLD tells it that a rank has ended"""
SETTLE_SECONDS = 1.0
GRACE_SECONDS = 5.0


def launch(
    command: Sequence[str],
    nproc: int,
    *,
    log_dir: Path,
    stop_timeout_seconds: float = 120.0,
    restarts: Restarts | None = None,
    signals: SignalPipe | None = None,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> int:
    """Run `nproc` ranks of a command until all have ended; return the exit code of the job.

    The first of SIGTERM, SIGINT, SIGHUP and SIGUSR1 is passed on to all ranks. They are killed
    after `stop_timeout_seconds`, and at once by a second SIGINT. When one rank fails, the others
    are ended within seconds.

    Args:
        command: command line of each rank, which finds its number with `environment.find_world`.
        nproc: number of ranks.
        log_dir: folder of `rank-N.log`, to which the output of ranks other than 0 is appended.
        stop_timeout_seconds: time that ranks have to save after a signal.
        restarts: counts the restarts of a job that failed unexpectedly; None allows none.
        signals: the pipe of a caller that listens to signals already.
        on_failure: called with a sentence that says which rank failed and how.

    Returns:
        0 if all ranks returned 0; 75 if they stopped with a checkpoint; 130 if they were killed
        while stopping; else the code of the rank that failed first.

    Raises:
        EnvironmentFault: a process or a log file cannot be created.
    """
    restarts = restarts or Restarts(0)
    with nullcontext(signals) if signals else SignalPipe(LAUNCHER_SIGNALS) as pipe:
        attempt = 0
        while True:
            job = _Job(nproc, stop_timeout_seconds, pipe)
            code = job.run([*command, *restarts.arguments()], log_dir, attempt)
            if job.cause:
                on_failure(job.cause.sentence)
            if code != ExitCode.FAILED or pipe.first or not restarts.allow():
                return code
            attempt += 1
            count = f"{restarts.count} of at most {restarts.limit} times"
            print_error(f"trainer: starting the ranks again ({count})")


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    code: int | None = None
    is_ended_by_us: bool = False


class _Job:
    """One attempt: all ranks, from start to end.

    Attributes:
        cause: why the attempt failed; None if it did not, or was stopped by a signal.
    """

    def __init__(self, nproc: int, stop_timeout_seconds: float, signals: SignalPipe) -> None:
        self._nproc = nproc
        self._stop_timeout_seconds = stop_timeout_seconds
        self._signals = signals
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []
        """ranks that ended by themselves, in the order in which that was noticed"""
        self._pending_signals: list[tuple[float, int]] = []
        """the time at which the running ranks get a signal, and its number; in order"""
        self.cause: Cause | None = None

    def run(self, command: Sequence[str], log_dir: Path, attempt: int) -> int:
        """Start the ranks, wait for their ends, and return the job's exit code."""
        try:
            with create_store_file() as (store, descriptors):
                environ = {**os.environ, STORE: store, ATTEMPT: str(attempt)}
                self._start(command, log_dir, environ, descriptors)
                self._wait()
        except OSError as error:
            raise EnvironmentFault(f"cannot run {self._nproc} processes: {error}") from error
        finally:
            # After an error of the launcher too: no rank may outlive it.
            for rank in self._ranks:
                _kill_group(rank.process)
                rank.process.wait()
        return self._exit_code(log_dir)

    def _wait(self) -> None:
        while self._running():
            now = time.monotonic()
            until = min((due for due, _ in self._pending_signals), default=now + 60.0)
            for number in self._signals.read(max(0.0, until - now)):
                self._handle_signal(number)
            self._reap()
            self._deliver_due()

    def _start(
        self,
        command: Sequence[str],
        log_dir: Path,
        environ: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        prepare = make_preexec_function(command)
        # Rank 0 reads the terminal, for `breakpoint()`. It is not the controlling terminal of the
        # rank's session, so that Ctrl-C still reaches this process alone.
        terminal = None if os.isatty(0) else subprocess.DEVNULL
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
                    stdin=subprocess.DEVNULL if number else terminal,
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

    def _handle_signal(self, number: int) -> None:
        kind = self._signals.judge(number)
        if kind == "repeated" and number == signal.SIGINT:
            self._pending_signals = [(0.0, signal.SIGKILL)]
        elif kind == "new":
            # To the rank alone: the data workers of its group end with it.
            for rank in self._running():
                rank.process.send_signal(number)
            # The first deadline stays: SIGTERM after SIGUSR1 does not give the ranks more time.
            deadline = time.monotonic() + self._stop_timeout_seconds
            self._pending_signals = self._pending_signals or [(deadline, signal.SIGKILL)]

    def _reap(self) -> None:
        """Take note of the ranks that ended; after the first failure the others are ended."""
        for rank in self._running():
            rank.code = rank.process.poll()
            if rank.code is None:
                continue
            _kill_group(rank.process)  # its data workers
            if rank.is_ended_by_us or rank.code in (ExitCode.DONE, ExitCode.STOPPED_AND_SAVED):
                continue
            if not self._failed:
                end = time.monotonic() + SETTLE_SECONDS
                # A rank that runs for another second may hang: its stacks say where.
                self._pending_signals += [
                    (end, STACKS_SIGNAL),
                    (end + 0.1, signal.SIGTERM),
                    (end + GRACE_SECONDS, signal.SIGKILL),
                ]
                self._pending_signals.sort()
            self._failed.append(rank)

    def _deliver_due(self) -> None:
        while self._pending_signals and self._pending_signals[0][0] <= time.monotonic():
            _, number = self._pending_signals.pop(0)
            for rank in self._running():
                # A rank that fails because of our signal is not the cause of the job's failure.
                rank.is_ended_by_us |= number != STACKS_SIGNAL
                if number == signal.SIGKILL:
                    _kill_group(rank.process)
                else:
                    rank.process.send_signal(number)

    def _exit_code(self, log_dir: Path) -> int:
        codes = [rank.code for rank in self._ranks]
        if not self._failed:
            if any(code not in (ExitCode.DONE, ExitCode.STOPPED_AND_SAVED) for code in codes):
                return ExitCode.INTERRUPTED  # killed because they did not stop in time
            stopped = ExitCode.STOPPED_AND_SAVED in codes
            return ExitCode.STOPPED_AND_SAVED if stopped else ExitCode.DONE
        # Reports of earlier attempts and of a larger world lie in the same folder.
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
            print_error("\n  ".join([f"trainer: {cause.sentence}", *cause.details]))
        return cause.code


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a rank's process group, also when the rank itself has ended.

    A rank is the leader of its session, so the number of the group is its own. The kernel does not
    reuse that number while a process of the group lives.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
