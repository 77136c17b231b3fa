"""Reports what this rank is doing, and ends a job in which no rank makes progress. Torch-free."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from ..core.errors import EnvironmentFault, ExitCode
from ..core.heartbeat import BeatFile, furthest_behind, heartbeat, read_beats
from .ending import print_error, show_cursor
from .environment import World
from .rank_log import RankLog

REPORTS_PER_LIMIT = 30
REPORTS_PER_SECOND = 100
"""of all ranks together; more ranks report less often, to spare a shared file system"""
GRACE_INTERVALS = 3
"""how many intervals a rank that found a hang waits for the stacks of the others"""


class Watchdog:
    """A thread of each rank that writes the rank's heartbeat and notices a lack of progress.

    When one rank hangs, all stop in their next collective: each writes its own stacks, names the
    rank that the others wait for, and ends. A job of one process is only reported, because no rank
    waits for it, and a debugger may hold it.

    Time is counted in waits of this thread, so that a job does not hang while it is suspended as a
    whole, by a scheduler or by closing a laptop.

    Args:
        log: the log of this rank, whose folder holds the heartbeats too.
        world: the place of this rank among the others.
        limit_seconds: time without progress after which a rank hangs.
        record: keeps the reason why the run failed, before the process ends; None on most ranks.
    """

    def __init__(
        self,
        log: RankLog,
        world: World,
        limit_seconds: float,
        record: Callable[[str], None] | None = None,
    ) -> None:
        self._log = log
        self._world = world
        self._limit = limit_seconds
        self._record = record
        usual = max(1.0, world.world_size / REPORTS_PER_SECOND)
        # At least thirty reports within the limit, so that a hang is noticed in time.
        self._interval = min(limit_seconds / REPORTS_PER_LIMIT, usual)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        heartbeat.begin(self._world.rank)
        folder, world = self._log.path.parent, self._world
        try:
            self._file = BeatFile(folder, world.rank, world.attempt, self._interval)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write in the run directory {folder}: {error.strerror}",
                "give another folder with `--set run.dir=...`, or free space there",
            ) from error
        self._arm()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        # The thread before the timer, which the thread would start again.
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.end(error)

    def _watch(self) -> None:
        mark, idle, is_reported = heartbeat.state.mark, 0.0, False
        while not self._done.wait(self._interval):
            self._file.write()
            self._arm()
            if heartbeat.state.mark != mark or not heartbeat.timed:
                mark, idle, is_reported = heartbeat.state.mark, 0.0, False
                continue
            idle += self._interval
            # One interval later than the limit: the heartbeats of all ranks show the hang then.
            if idle >= self._limit + self._interval and not is_reported:
                is_reported = True
                self._report_hang()
            is_over = idle >= self._limit + GRACE_INTERVALS * self._interval
            if is_over and self._world.world_size > 1:
                self._end_process()

    def _arm(self) -> None:
        """Let a thread in C write the stacks if this one does not get Python's lock in time."""
        if self._log.descriptor >= 0:
            faulthandler.dump_traceback_later(self._limit, file=self._log.descriptor)

    def _report_hang(self) -> None:
        text = f"no progress for {self._limit:g} s in {heartbeat.state.where}; the stacks"
        self._log.write_stacks(f"{text}:")
        if self._world.world_size == 1:
            print_error(f"warning: {text} of its threads are in {self._log.path}")

    def _end_process(self) -> None:
        """Name the rank that the others wait for, and end this process."""
        beats = [b for b in read_beats(self._log.path.parent) if b.rank < self._world.world_size]
        behind = furthest_behind(beats)
        text = explain_hang(behind.describe(time.time()) if behind else "a rank", self._log.path)
        # `furthest_behind` leaves out ranks that lost contact, so the launcher names this one too.
        is_self = behind is not None and behind.rank == self._world.rank
        self._file.write("hang" if is_self else "lost contact", text)
        self._log.write(text)
        if self._record:
            self._record(text)
        if self._world.launcher != "trainer":  # our launcher prints it once for all ranks
            print_error(f"error: {text}")
        show_cursor()
        # Not by an exception: the main thread is in a collective and would never raise it.
        os._exit(ExitCode.FAILED)


def explain_hang(behind: str, log: Path) -> str:
    """Return the sentence that names the rank that the others wait for."""
    return f"the job hangs: {behind}; the stacks of each rank are in {log.parent}/rank-N.log"
