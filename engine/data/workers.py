"""Processes that read batches ahead, and the one that tokenises a stream."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any
from weakref import finalize

import torch

from ..core.errors import DataError, EnvironmentFault, TrainerError
from ..core.processes import die_with_parent
from .packing import PackedRows
from .windows import PrefetchRange, Producer, Start

POLL_SECONDS = 1.0


class Steps:
    """Rows by step, for a worker: an error is returned rather than raised."""

    def __init__(self, read: Callable[[int], PackedRows]) -> None:
        self.read = read

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> PackedRows | str:
        try:
            return self.read(step)
        except Exception as error:  # whatever it is, it must reach the training process
            return f"{type(error).__name__}: {error}"


def prefetch_steps(
    read: Callable[[int], PackedRows], first_step: int, workers: int, timeout_seconds: float
) -> Iterator[PackedRows]:
    """Yield `read(step)` for each step from `first_step` on, computed by worker processes.

    Worker `i` reads every `workers`-th step; the order is that of the steps.

    Raises:
        DataError: a worker raised, died, or took longer than the timeout.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    parent, others = os.getpid(), set(multiprocessing.active_children())
    on_child = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings(action="ignore"):  # it calls what torch has deprecated
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            Steps(read),
            batch_size=None,
            sampler=range(first_step, sys.maxsize),
            num_workers=workers,
            timeout=min(POLL_SECONDS, timeout_seconds),
            multiprocessing_context="fork",
            worker_init_fn=lambda _worker: die_with_parent(parent),
            # Arrays travel through a pipe; tensors would need shared memory, scarce in containers.
            collate_fn=_as_they_are,
            # Without one of its own it would draw from the run's generator.
            generator=torch.Generator(),
            # The step is the whole state.
            snapshot_every_n_steps=None,
        )
    batches = iter(loader)
    # torch's handler raises in whatever the main thread happens to do when a worker dies.
    signal.signal(signal.SIGCHLD, on_child)
    processes = set(multiprocessing.active_children()) - others

    def end() -> None:
        while processes:
            processes.pop().kill()

    # At exit multiprocessing sends SIGTERM, which the workers ignore, and waits.
    atexit.register(end)
    step = first_step
    try:
        while True:
            yield _next(batches, timeout_seconds, step, (step - first_step) % workers)
            step += 1
    finally:
        del batches
        end()
        atexit.unregister(end)


def _next(batches: Iterator[Any], timeout_seconds: float, step: int, worker: int) -> PackedRows:
    """Return the next batch, waiting in short turns so that a dead worker is noticed soon."""
    started, who = time.monotonic(), f"step {step}: data worker {worker}"
    while True:
        try:
            batch: PackedRows | str = next(batches)
            break
        except RuntimeError as error:
            waited = time.monotonic() - started
            if "timed out" not in str(error):
                # Any of them: torch names the process, and not whose turn it was.
                raise DataError(
                    f"step {step}: a data worker died: {error}",
                    "out of memory? fewer data.workers need less",
                ) from error
            if waited >= timeout_seconds:
                raise DataError(
                    f"{who} gave no batch in {waited:.0f} s",
                    "is the storage stalled? data.worker_timeout_seconds sets how long to wait",
                ) from error
    if isinstance(batch, str):
        raise DataError(f"{who}: {batch}")
    return batch


def _as_they_are(rows: PackedRows | str) -> PackedRows | str:
    return rows


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
