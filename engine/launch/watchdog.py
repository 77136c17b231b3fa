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
"""of all ranks together, above which each reports less often: one shared file system takes them"""
GRACE_INTERVALS = 3
"""how long a rank that found a hang waits for the stacks of the others"""


class Watchdog:
    """A thread of each rank that writes its heartbeat and notices when it makes no progress.

    Ranks in lockstep all stop when one does, so each writes its own stacks, and then names the one
    that the others wait for. Several ranks end; a single process is only reported, since nobody
    waits for it, and a debugger may hold it.

    Time is counted in waits of this thread: a job that is suspended as a whole, by a scheduler or
    by closing a laptop, does not hang.

    Args:
        log: of this rank; its folder holds the heartbeats too.
        world: this rank's place among the others.
        limit_seconds: of time without progress.
        record: keeps the reason why the run failed, on one rank, before the process ends.
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
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.end(error)

    def _watch(self) -> None:
        mark, idle, told = heartbeat.state.mark, 0.0, False
        while not self._done.wait(self._interval):
            self._file.write()
            self._arm()
            if heartbeat.state.mark != mark or not heartbeat.timed:
                mark, idle, told = heartbeat.state.mark, 0.0, False
                continue
            idle += self._interval
            if idle >= self._limit + self._interval and not told:
                told = True
                self._tell()
            if (
                idle >= self._limit + GRACE_INTERVALS * self._interval
                and self._world.world_size > 1
            ):
                self._end()

    def _arm(self) -> None:
        """Let a thread in C write the stacks if this one does not get Python's lock for so long."""
        if self._log.descriptor >= 0:
            faulthandler.dump_traceback_later(self._limit, file=self._log.descriptor)

    def _tell(self) -> None:
        state = heartbeat.state
        title = (
            f"no progress for {self._limit:g} s in step {state.step}, {state.phase}; the stacks:"
        )
        self._log.write_stacks(title)
        if self._world.world_size == 1:
            where = f"in step {state.step}, {state.phase}"
            print_error(
                f"warning: no progress for {self._limit:g} s {where}; "
                f"the stacks of its threads are in {self._log.path}"
            )

    def _end(self) -> None:
        """Name the rank that the others wait for, and end this process."""
        beats = [b for b in read_beats(self._log.path.parent) if b.rank < self._world.world_size]
        behind = furthest_behind(beats)
        text = explain_hang(behind.describe(time.time()) if behind else "a rank", self._log.path)
        is_self = behind is not None and behind.rank == self._world.rank
        self._file.write("hang" if is_self else "lost contact", text)
        self._log.write(text)
        if self._record:
            self._record(text)
        if self._world.launcher != "trainer":  # ours says it once for all ranks
            print_error(f"error: {text}")
        show_cursor()
        os._exit(ExitCode.FAILED)


def explain_hang(behind: str, log: Path) -> str:
    """Return the sentence that names the rank that the others wait for."""
    return f"the job hangs: {behind}; the stacks of each rank are in {log.parent}/rank-N.log"
