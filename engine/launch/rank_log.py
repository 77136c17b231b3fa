"""`logs/rank-N.log`: what a rank of a run says when it fails. Torch-free."""

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
    """Appends to the log of one rank; nothing is written where that cannot be.

    Args:
        folder: the run's `logs`; made if it is missing.
        rank: this process's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.log"
        self._rank = rank
        self._file = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError):  # whoever prepares the run directory says what is wrong with it
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, flags, 0o644)

    @property
    def descriptor(self) -> int:
        """Where crash handlers write to; -1: nowhere."""
        return self._file

    def write(self, title: str, text: str = "") -> None:
        """Append a line with the time and this process, and a text below it."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        header = f"--- {now} rank {self._rank}, process {os.getpid()}: {title}\n"
        with suppress(OSError):
            os.write(self._file, redact(header + text).encode("utf-8", "backslashreplace"))

    def record(self, error: BaseException) -> bool:
        """Append the traceback of an error that ends the run; return whether that worked."""
        if self._file < 0:
            return False
        state = heartbeat.state
        where = f"step {state.step}, {state.phase}" if state.step else state.phase
        self.write(f"{type(error).__name__} in {where}", "".join(traceback.format_exception(error)))
        return True

    def write_stacks(self, title: str) -> None:
        """Append the stacks of all threads."""
        self.write(title)
        if self._file >= 0:
            faulthandler.dump_traceback(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)


@contextmanager
def open_rank_log(folder: Path, rank: int) -> Iterator[RankLog]:
    """Keep the log of this rank around a run.

    An error that leaves the context is recorded with its traceback, and told where that is. A crash
    (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) leaves the stacks of all threads, and so does
    `STACKS_SIGNAL`, even while Python's lock is held.
    """
    log, was_enabled = RankLog(folder, rank), faulthandler.is_enabled()
    if log.descriptor >= 0:
        faulthandler.enable(log.descriptor)
        faulthandler.register(STACKS_SIGNAL, log.descriptor)
    log.write("the run begins")
    try:
        yield log
    except Exception as error:
        # The log of a run directory that is another run's is not ours to write to.
        if not isinstance(error, RunInUse) and log.record(error):
            error.add_note(f"the traceback is in {log.path}")
        raise
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.disable()
        if was_enabled:
            with suppress(OSError, ValueError, RuntimeError):
                faulthandler.enable()
        log.close()
