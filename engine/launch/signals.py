"""Stopping on a signal: the first asks, the second ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..errors import ExitCode, LostContact

if TYPE_CHECKING:
    import torch.distributed as dist

URGENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (*URGENT, signal.SIGUSR1)
# A terminal and a wrapper (uv, make) may both deliver one Ctrl-C.
ECHO_SECONDS = 0.1
SHOW_CURSOR = b"\x1b[?25h\n"


def _noop(number: int, frame: FrameType | None) -> None:
    """Exist, so that the signal reaches the wakeup descriptor."""


class StopFlag:
    """Set by SIGTERM, SIGINT, SIGHUP or SIGUSR1; a second one of the first three exits with 130.

    SIGUSR1 is a scheduler's early warning, so what follows it counts as the first. A thread reads
    the signals: also while the main thread waits in a collective, the second one ends the process.
    As a context, entered in the main thread, it puts back the handlers it found.

    Attributes:
        group: whom `agree` asks; None in one process.
        reason: the name of the first signal, empty before.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.reason = ""
        self._urgent_at = 0.0
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._write_end = -1

    def __enter__(self) -> Self:
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, _noop)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True).start()
        _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _active.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write_end)  # ends the thread

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return bool(self.reason)

    def agree(self) -> bool:
        """Return whether any rank was asked to stop; all ranks call it together."""
        return any_rank([self.requested], self.group)[0]

    def _listen(self, read_end: int) -> None:
        while numbers := os.read(read_end, 64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._receive(number)
        os.close(read_end)

    def _receive(self, number: int) -> None:
        if not self.reason:
            self.reason = signal.Signals(number).name
            with suppress(OSError, ValueError):
                print(
                    f"{self.reason}: saving and stopping after this step; again to exit at once",
                    file=sys.stderr,
                    flush=True,
                )
        if number not in URGENT:
            return
        now = time.monotonic()
        if not self._urgent_at:
            self._urgent_at = now
        elif now - self._urgent_at > ECHO_SECONDS:
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)
            os._exit(ExitCode.INTERRUPTED)


def any_rank(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank: one small all-reduce.

    Args:
        flags: equally many on each rank.
        group: a gloo group, so that no GPU is waited for; None in one process.

    Raises:
        LostContact: another rank ended.
    """
    if group is None:
        return list(flags)
    import torch
    import torch.distributed as dist

    votes = torch.tensor(flags, dtype=torch.int32)
    try:
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise LostContact.by(group.rank(), error) from error
    return [bool(vote) for vote in votes.tolist()]


_active: list[StopFlag] = []


def _forget_in_child() -> None:
    """Keep forked data workers out of it: they neither report signals nor die of Ctrl-C."""
    if _active:
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            default = signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
            signal.signal(number, default)
        _active.clear()


os.register_at_fork(after_in_child=_forget_in_child)
