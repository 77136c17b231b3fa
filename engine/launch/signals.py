"""Stop a run on a signal: after the step, or at once while nothing can be lost. Torch-free."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from ..core.errors import ExitCode, Stopped
from .ending import STOP_SIGNALS, TICK_SECONDS, SignalPipe, end_abruptly, print_error

if TYPE_CHECKING:
    from .group import RankPeers

GRACE_SECONDS = 20.0
"""how long the main thread may work in C++ before another thread ends the process"""
_END = 0
"""the number in the pipe that ends the thread which reads it"""


class StopRequested(BaseException):
    """Raised in the main thread to give up work that can be repeated; the run saves and stops."""


class StopFlag:
    """Set by SIGTERM, SIGINT, SIGHUP or SIGUSR1; a second one of the first three exits with 130.

    SIGUSR1 is a scheduler's early warning, so the signal after it counts as the first. A thread
    reads the signals, so that the second one ends the process also while the main thread waits in
    a collective.

    As a context, entered in the main thread, it puts back the handlers that it found. Where signals
    were blocked before, as by `cli/entry.py`, it stays until the process ends.

    Attributes:
        reason: name of the first signal, empty before it.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._pipe = SignalPipe(STOP_SIGNALS, self._handle)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._peers: RankPeers | None = None
        self._answer: Callable[[], ExitCode] = lambda: ExitCode.INTERRUPTED
        self._record: Callable[[], None] = lambda: None
        self._at_once = False
        self._is_leaving = False
        self._is_over = False
        self._grace_seconds = GRACE_SECONDS
        self._changed_at = 0.0
        self._waiting_since = 0.0
        self._is_for_life = False

    def __enter__(self) -> Self:
        self._pipe.__enter__()
        self._thread.start()
        _active.append(self)
        # Last: signals that came while they were blocked are handled now, by handlers that are
        # ready.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._is_for_life = signal.SIGTERM in blocked
        if self._is_for_life:
            # Python puts the system's answers back when it ends, after all that is registered.
            atexit.register(_ignore_signals)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish()
        if self._is_for_life:
            return
        _active.remove(self)
        self._pipe.put(_END)
        self._thread.join()
        self._pipe.__exit__(kind, error, traceback)

    @property
    def requested(self) -> bool:
        """Whether a signal asked this process to stop."""
        return bool(self.reason)

    def agree(self) -> bool:
        """Return whether a signal asked any rank to stop; all ranks call it together.

        Raises:
            LostContact: another rank ended.
        """
        return self._peers.any(self.requested) if self._peers else self.requested

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has joined this one."""
        return self._peers is None

    def end_at_once(
        self,
        answer: Callable[[], ExitCode] | None = None,
        record: Callable[[], None] | None = None,
        *,
        abruptly: bool = False,
    ) -> None:
        """Let a signal raise `Stopped` from now on, on all ranks: nothing can be lost.

        If the main thread does not raise it within `GRACE_SECONDS`, because it works in C++, the
        process is ended.

        Args:
            answer: returns the exit code; None keeps the last one given, which is 130 at first.
            record: writes that the run was stopped, if the main thread does not answer; None keeps
                the last one given.
            abruptly: end the process without raising, because there is nothing to clean up.

        Raises:
            Stopped: a signal has come already.
        """
        self._answer = answer or self._answer
        self._record = record or self._record
        # Set before the flag is read: a signal that comes in between is then handled by `_handle`.
        self._at_once, self._changed_at = True, time.monotonic()
        self._grace_seconds = 0.0 if abruptly else GRACE_SECONDS
        if self.requested:
            self._leave()

    def defer(self) -> None:
        """Let a signal only set the flag from now on, which `agree` reports."""
        self._at_once = False

    def finish(self) -> None:
        """Let a first signal change nothing from now on, because the work is done."""
        self._at_once, self._is_over = False, True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise `StopRequested` if this block takes long; it can be repeated."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = 0.0

    def join(self, peers: RankPeers) -> None:
        """Watch from now on whether another rank is asked to stop, also without `agree`."""
        self._peers = peers
        if self in _active:
            threading.Thread(target=self._watch, args=(peers,), daemon=True).start()

    def leave_job(self, code: ExitCode) -> None:
        """Tell the other ranks that this one ends at once because of a signal."""
        if self._peers is not None:
            self._peers.leave(self.reason, code)

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Raise `Stopped` in place of an error that follows from a stop of this or another rank."""
        try:
            yield
        except Exception as error:
            if self._is_leaving:
                raise Stopped(self._answer()) from error
            if self._peers is not None and (code := self._peers.code_of_leaver()):
                raise Stopped(code) from error
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception that stops the main thread; the thread of `_listen` does the rest."""
        if self._at_once:
            if self._grace_seconds and not _is_importing(frame):
                self._leave()
        elif self._waits_long() and self.requested:
            self._waiting_since = 0.0
            raise StopRequested

    def _leave(self) -> None:
        if not self._is_leaving:  # once: clean-up that this starts must not be interrupted
            self._is_leaving = True
            raise Stopped(self._answer())

    def _waits_long(self) -> bool:
        return 0 < self._waiting_since < time.monotonic() - TICK_SECONDS

    def _listen(self) -> None:
        while True:
            numbers = self._pipe.read(TICK_SECONDS if self.requested else None)
            if _END in numbers:
                return
            for number in numbers:
                self._receive(number)
            # The handler has run already, but perhaps before `_receive` set the reason, or during
            # an import. It runs again each tick until the main thread raises.
            if not numbers and (self._at_once or self._waits_long()):
                _run_handler()
            waited = time.monotonic() - self._changed_at
            if self.requested and self._at_once and waited >= self._grace_seconds:
                self._end(self._answer())

    def _receive(self, number: int) -> None:
        kind = self._pipe.judge(number)
        # In this thread, because the main thread may wait in a collective that never ends.
        if kind == "repeated":
            end_abruptly(ExitCode.INTERRUPTED)
        if not self.reason and kind == "new":
            self.reason, self._changed_at = signal.Signals(number).name, time.monotonic()
            if self._at_once:
                print_error(f"{self.reason}: stopping at once")
            elif not self._is_over:
                print_error(
                    f"{self.reason}: saving and stopping after this step; again to exit at once"
                )

    def _end(self, code: ExitCode) -> None:
        """End the process, because the main thread does not answer."""
        # In a thread, as the store may not answer; `RankPeers.leave` may take two ticks itself.
        notice = threading.Thread(target=self.leave_job, args=(code,), daemon=True)
        notice.start()
        notice.join(3 * TICK_SECONDS)
        self._record()
        if self._grace_seconds:
            print_error("stopped while the main thread did not answer")
        end_abruptly(code)

    def _watch(self, peers: RankPeers) -> None:
        """Tell the other ranks of a signal, and look for theirs while this rank may act on it."""
        while not (self._is_over or self.requested):
            time.sleep(TICK_SECONDS)
            if (self._at_once or self._waits_long()) and peers.is_asked():
                self._pipe.put(signal.SIGUSR1)  # as if it came to this rank
        if self.requested:
            peers.ask(self.reason)


_active: list[StopFlag] = []


def _run_handler() -> None:
    """Make the main thread run its Python handler, by a SIGUSR1 that changes nothing else.

    Python calls handlers in the main thread alone, and the signal also interrupts a system call in
    which that thread may wait.
    """
    if (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, signal.SIGUSR1)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported, whose C++ code may drop an exception."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _forget_in_child() -> None:
    """Let forked data workers ignore signals: they neither report them nor die of Ctrl-C."""
    if _active:
        # The pipe is shared with the parent, which would take the child's signals for its own.
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            # SIGTERM still ends a worker: `multiprocessing` stops its processes with it.
            default = signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
            signal.signal(number, default)
        _active.clear()


os.register_at_fork(after_in_child=_forget_in_child)
