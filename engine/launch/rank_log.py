"""The log of a rank, `logs/rank-N.log`: its errors and stacks. Torch-free."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from ..core.errors import RunInUse
from ..core.heartbeat import heartbeat
from ..core.text.display import redact

STACKS_SIGNAL = signal.SIGUSR2
"""makes a rank write the stacks of its threads into its log"""


class RankLog:
    """Appends to the log of one rank; does nothing where the log cannot be written.

    Args:
        folder: the run's `logs`, which is created if it is missing.
        rank: number of this rank.

    Attributes:
        path: path of the log.
        descriptor: the open file, for crash handlers; -1 if there is none.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.log"
        self._rank = rank
        self.descriptor = -1
        # O_APPEND: the launcher writes the rank's output to the same file. O_NOFOLLOW and
        # O_NONBLOCK: a link of that name is not followed, and a fifo does not block the run.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError):  # the run directory reports what is wrong with it
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.path, flags, 0o644)

    def write(self, title: str, text: str = "") -> None:
        """Append a line with the time and the process, and a text below it."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        header = f"--- {now} rank {self._rank}, process {os.getpid()}: {title}\n"
        with suppress(OSError):
            # In one call: lines of other processes do not come between.
            os.write(self.descriptor, redact(header + text).encode("utf-8", "backslashreplace"))

    def record(self, error: BaseException) -> bool:
        """Append the traceback of an error that ends the run, and return whether that worked."""
        if self.descriptor < 0:
            return False
        title = f"{type(error).__name__} in {heartbeat.state.where}"
        self.write(title, "".join(traceback.format_exception(error)))
        return True

    def write_stacks(self, title: str) -> None:
        """Append the stacks of all threads."""
        self.write(title)
        if self.descriptor >= 0:
            faulthandler.dump_traceback(self.descriptor)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


@contextmanager
def open_rank_log(folder: Path, rank: int) -> Iterator[RankLog]:
    """Open the log of this rank for the time of a run.

    An error that leaves the context is recorded with its traceback, and gets a note that names the
    log. A crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) writes the stacks of all threads, and so
    does `STACKS_SIGNAL`, even while Python's lock is held.
    """
    log, was_enabled = RankLog(folder, rank), faulthandler.is_enabled()
    if log.descriptor >= 0:
        faulthandler.enable(log.descriptor)
        faulthandler.register(STACKS_SIGNAL, log.descriptor)
    log.write("the run begins")
    try:
        yield log
    except Exception as error:
        # Another run has the directory, and so the log.
        if not isinstance(error, RunInUse) and log.record(error):
            error.add_note(f"the traceback is in {log.path}")
        raise
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
        # Before the log is closed: another file may get the number of its descriptor.
        faulthandler.disable()
        if was_enabled:
            with suppress(OSError, ValueError, RuntimeError):
                faulthandler.enable()
        log.close()
