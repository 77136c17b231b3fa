"""Signals that ask a process to end, and how it ends. Torch-free."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, Self

URGENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (*URGENT, signal.SIGUSR1)
# A terminal and a wrapper (uv, make) may both deliver one Ctrl-C.
ECHO_SECONDS = 0.1
TICK_SECONDS = 1.0
"""how often a rank looks whether another one was asked to stop"""
SHOW_CURSOR = b"\x1b[?25h\n"
_skips_teardown = False


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal reaches the wakeup descriptor."""


class SignalPipe:
    """Queues signals in a pipe, which one thread reads; they interrupt nothing.

    As a context, entered in the main thread, it puts back the handlers that it found.

    Args:
        numbers: the signals; SIGHUP only where it is not ignored (nohup).
        handler: called in the main thread too, between two bytecodes.

    Attributes:
        first: the first signal that asked to stop, 0 before.
    """

    def __init__(
        self, numbers: Sequence[int], handler: Callable[[int, FrameType | None], None] = _ignore
    ) -> None:
        self.first = 0
        self._numbers = numbers
        self._handler = handler
        self._urgent_at = 0.0

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        # The interpreter writes a byte for each signal. It must not wait for the reader; a byte
        # that a full pipe loses comes after thousands that are not yet read.
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        # After the wakeup descriptor is set: a signal between the two would not reach the pipe.
        self._handlers_before: dict[int, Any] = {
            number: signal.signal(number, self._handler)
            for number in self._numbers
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The handlers first, and the pipe last: no signal may be written to a closed descriptor.
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read_end)
        os.close(self._write_end)

    def read(self, seconds: float | None) -> list[int]:
        """Return the signals that came, as soon as there is one; none after `seconds`."""
        is_ready = select.select([self._read_end], [], [], seconds)[0]
        return list(os.read(self._read_end, 4096)) if is_ready else []

    def put(self, number: int) -> None:
        """Queue a number as if it were a signal that came."""
        os.write(self._write_end, bytes([number]))

    def judge(self, number: int) -> Literal["new", "echo", "repeated", "other"]:
        """Return what a signal is to the ones before it.

        SIGUSR1 is a scheduler's early warning: an urgent signal after it is the first urgent one.
        """
        if number not in STOP_SIGNALS:
            return "other"
        self.first = self.first or number
        now = time.monotonic()
        if number not in URGENT or not self._urgent_at:
            self._urgent_at = now if number in URGENT else self._urgent_at
            return "new"
        return "repeated" if now - self._urgent_at > ECHO_SECONDS else "echo"


def skip_teardown() -> None:
    """Make `end_process` leave without the interpreter's teardown.

    The teardown frees every object one by one, for which short commands need a third of their time.
    A process group's threads may ask for the interpreter's lock once more after the last
    collective. If the teardown has begun by then, the process aborts: seen in 2 of 96 ends of
    ranks with torch 2.13 and gloo, after all work was done.
    """
    global _skips_teardown
    _skips_teardown = True


def end_process(code: int) -> NoReturn:
    """End with an exit code; handlers registered with `atexit` run in any case."""
    if not _skips_teardown:
        sys.exit(code)
    # `os._exit` neither calls registered functions nor flushes streams.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_abruptly(code: int) -> NoReturn:
    """End without cleaning up. Children of ours end with this process (Linux), or here."""
    # Not imported here: where nothing else has imported it, there are no children.
    processes = sys.modules.get("multiprocessing")
    for process in processes.active_children() if processes else ():
        process.kill()
    show_cursor()
    os._exit(code)


def show_cursor() -> None:
    """Give a terminal its cursor back, which a progress bar hides."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, SHOW_CURSOR)


def print_error(text: str) -> None:
    """Print a line on stderr; nothing happens where that is closed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
