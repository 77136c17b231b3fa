"""Runs functions on the ranks of a gloo group, in processes that start with torch imported.

Torch-free: a server imports torch once, and the processes are forked from it. Each group has new
ones: torch keeps the process groups of meshes in caches, and a second group in a process could get
those of the first (torch 2.13).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, NamedTuple, Self

from ..core.errors import EnvironmentFault, TrainerError
from ..core.processes import die_with_parent
from ..estimate.memory import PRELOADED
from ..launch.environment import TRACEBACK

RANK_MODULE = f"{__package__}.rank"
SILENCE_SECONDS = 120.0
"""how long all ranks may begin no phase before they count as deadlocked"""

Report = Callable[[str], None]
"""tells the parent the phase that a rank begins"""


class Order(NamedTuple):
    """What a process is to do as a rank.

    Attributes:
        function: see `RankPool.run`.
        rank: the rank of the process.
        ranks: how many processes work together.
        store: the file in which they find each other.
        args: further arguments.
    """

    function: str
    rank: int
    ranks: int
    store: str
    args: tuple[Any, ...]


class RankPool:
    """Starts processes that compute as the ranks of one group after another; a context.

    Nothing is left when the context ends, also by Ctrl-C: the processes are killed and the folder
    in which they meet is removed.

    Args:
        silence_seconds: see `SILENCE_SECONDS`.
    """

    def __init__(self, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._silence_seconds = silence_seconds
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, RANK_MODULE])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = TemporaryDirectory(prefix="trainer-check-")
        self._groups = 0

    @property
    def folder(self) -> Path:
        """A private folder, which ends with the pool."""
        return Path(self._folder.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def run(self, ranks: int, function: str, *args: Any) -> list[Any]:
        """Return what a function returns on each rank.

        Args:
            ranks: how many processes work together; several have a process group.
            function: "module:name" of a function that takes rank, ranks, a `Report` and `args`.
            args: further arguments, which can be pickled.

        Raises:
            TrainerError: a rank failed, or all wait for each other.
        """
        self._groups += 1
        store = str(self.folder / f"store-{self._groups}")
        try:
            for _ in range(ranks):
                self._start()
            # Only now, as no process may wait for one that an interrupt has kept from being there.
            for rank, pipe in enumerate(self._pipes):
                pipe.send(Order(function, rank, ranks, store, args))
            return self._collect(ranks)
        finally:
            self._end()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=obey, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _collect(self, ranks: int) -> list[Any]:
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        phases, results = ["start"] * ranks, [None] * ranks
        deadline = time.monotonic() + self._silence_seconds
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TrainerError(
                    _describe_silence(phases, waiting.values(), self._silence_seconds)
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise EnvironmentFault(
                        f"rank {rank} was killed in {phases[rank]!r}", "is memory short?"
                    ) from None
                if kind == "failed":
                    raise _failure(rank, phases[rank], *content)
                if kind == "phase":
                    phases[rank] = content
                    deadline = time.monotonic() + self._silence_seconds
                else:
                    results[rank] = content
                    del waiting[pipe]
        return results


def _describe_silence(phases: list[str], waiting: Any, seconds: float) -> str:
    places: dict[str, list[str]] = {}
    for rank in sorted(waiting):
        places.setdefault(phases[rank], []).append(str(rank))
    where = "; ".join(f"rank {', '.join(found)} in {phase!r}" for phase, found in places.items())
    return f"deadlock: no rank went on for {seconds:g} s: {where}"


def _failure(rank: int, phase: str, error: Exception | None, text: str) -> Exception:
    """Return the error of a rank: its own, if it is one that we foresee."""
    if error is not None:
        return error
    last = text.strip().splitlines()[-1]
    hint = "" if TRACEBACK in os.environ else "run the same with --traceback to see where"
    trace = f"\n{text}" if TRACEBACK in os.environ else ""
    return TrainerError(f"rank {rank} failed in {phase!r}: {last}{trace}", hint)


def obey(pipe: Connection) -> None:
    """Do what an order says that comes through a pipe, and send back the result, or the error."""
    die_with_parent(os.getppid())
    # The parent is the server, which lives as long as its children do: the process that asked for
    # this one may end between the fork and the moment when it knows of it.
    threading.Thread(target=_end_with_caller, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reply: tuple[str, Any]
    try:
        order: Order = pipe.recv()
    except EOFError:
        return
    try:
        reply = "done", _obey(order, pipe)
    except Exception as error:
        # Others need not survive the way through a pipe.
        foreseen = error if isinstance(error, TrainerError) else None
        reply = "failed", (foreseen, traceback.format_exc())
    with suppress(BrokenPipeError):
        pipe.send(reply)
    sys.stderr.flush()
    # Else Python would first wait for threads of the group, which other ranks may hold.
    os._exit(0)


def _end_with_caller() -> None:
    """Wait for the end of the process that started this rank, and end with it."""
    caller = parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)


def _obey(order: Order, pipe: Connection) -> Any:
    module, _, name = order.function.partition(":")
    function = getattr(import_module(module), name)
    # The parent does without torch, which that module imports.
    process_group = import_module(RANK_MODULE).process_group
    with process_group(order.rank, order.ranks, order.store):
        return function(
            order.rank, order.ranks, lambda text: pipe.send(("phase", text)), *order.args
        )
