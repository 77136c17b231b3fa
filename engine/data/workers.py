"""Worker processes that read the batches of coming steps."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core.errors import DataError
from ..core.processes import die_with_parent
from .samples import Rows

POLL_SECONDS = 1.0


class StepDataset:
    """Rows by step, for a worker; an error is returned instead of being raised."""

    def __init__(self, read: Callable[[int], Rows]) -> None:
        self.read = read

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> Rows | str:
        try:
            return self.read(step)
        except Exception as error:  # whatever it is, it must reach the training process
            return f"{type(error).__name__}: {error}"


def prefetch_steps(
    read: Callable[[int], Rows], first_step: int, workers: int, timeout_seconds: float
) -> Iterator[Rows]:
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
            StepDataset(read),
            batch_size=None,
            sampler=range(first_step, sys.maxsize),
            num_workers=workers,
            timeout=min(POLL_SECONDS, timeout_seconds),
            multiprocessing_context="fork",
            worker_init_fn=lambda _worker: _begin_worker(parent),
            # Arrays travel through a pipe; tensors would need shared memory, scarce in containers.
            collate_fn=lambda rows: rows,
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


def _begin_worker(parent: int) -> None:
    die_with_parent(parent)
    # Garbage of the training process would be collected here too, and what ends with it may wait
    # for a thread that only the training process has: forever, and with a lock of the loader held.
    gc.freeze()


def _next(batches: Iterator[Any], timeout_seconds: float, step: int, worker: int) -> Rows:
    """Return the next batch, waiting in short turns so that a dead worker is noticed soon."""
    started, who = time.monotonic(), f"step {step}: data worker {worker}"
    while True:
        try:
            batch: Rows | str = next(batches)
            break
        except RuntimeError as error:
            waited = time.monotonic() - started
            if "timed out" not in str(error):
                # Any worker: torch names the one that died, which need not be this step's.
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
