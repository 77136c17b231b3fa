"""The process that tokenises a stream, as the training process sees it."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO
from weakref import finalize

from ..core.errors import EnvironmentFault, TrainerError
from .windows import PrefetchRange, Producer, Start


class Child:
    """The process that tokenises, as its parent sees it. It ends with this object.

    Args:
        producer: what it runs.
        lock: held as long as one of both lives.
    """

    def __init__(self, producer: Producer, lock: IO[bytes]) -> None:
        parent = os.getpid()
        self._pipe, other = Pipe()
        # Forked: it starts at once, and a script that trains needs no `if __name__` guard.
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            producer.serve(other, parent)
        other.close()
        self._lock = lock
        self.failure: TrainerError | None = None
        self._started = False
        self._need: PrefetchRange | None = None
        self._end = finalize(self, _end, self.pid, self._pipe, lock)

    def tell(self, start: Start, need: PrefetchRange) -> None:
        """Say what training needs."""
        with suppress(OSError):  # it may have ended: `wait` says why
            if not self._started:
                self._pipe.send(start)
                self._started = True
            if need != self._need:
                self._pipe.send(need)
                self._need = need

    def wait(self, seconds: float) -> bool:
        """Wait a little for the end of the child; return whether it lives, or set `failure`."""
        with suppress(EOFError, OSError):
            if not self._pipe.poll(seconds):
                return True
            kind, message, hint = self._pipe.recv()
            self.failure = kind(message, hint)
        self._end()
        return False


def _end(pid: int, pipe: Connection, lock: IO[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    pipe.close()
    lock.close()


def start_child(producer: Producer) -> Child | None:
    """Return a child; None: another process of this machine has one for the same stream.

    Raises:
        EnvironmentFault: the cache cannot be written.
    """
    try:
        producer.folder.mkdir(parents=True, exist_ok=True)
        lock = open(producer.folder / "lock", "ab")  # noqa: SIM115  held while it produces
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {producer.folder}: {error.strerror}",
            "set data.cache_dir to a folder that is writable and has room",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return Child(producer, lock)
