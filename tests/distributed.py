"""Run a function on the ranks of a gloo group, in processes that start in a fraction of a second.

    losses = run_ranks(2, train_two_steps, tmp_path, timeout=60)   # a list, by rank

The function lives at the top level of a test module and asks `torch.distributed` for its rank.
One rank means no process group, as in a real run of one process. What it returns travels by
pickle, so plain Python and numpy are best.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / ".dev"):  # children import `tests...` and `trainer...` as we do
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint",
        "torch._dynamo.utils",  # DTensor operations import it
        "trainer.engine.run.run",
        "tests.train.plans",
        "numpy",
        "pytest",
    ]
)
SECONDS_AFTER_A_FAILURE = 5.0


@dataclass
class Outcome:
    """How one rank ended: with a value, with a traceback, or by a signal."""

    rank: int
    value: Any = None
    error: str = ""
    exit_code: int | None = None

    @property
    def succeeded(self) -> bool:
        return not self.error


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Return what `function(*args)` returned on each rank.

    Raises:
        AssertionError: a rank raised, died or was still running after `timeout` seconds; the
            text holds the tracebacks. Every process has ended when this function returns.
    """
    outcomes = run_ranks_to_their_ends(
        world, function, *args, timeout=timeout, env=env, grace=SECONDS_AFTER_A_FAILURE
    )
    failures = [f"rank {o.rank} of {world}:\n{o.error}" for o in outcomes if not o.succeeded]
    assert not failures, "\n".join(failures)
    return [outcome.value for outcome in outcomes]


def run_ranks_to_their_ends(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    grace: float | None = None,
) -> list[Outcome]:
    """Return how each rank ended; the way to test ranks that are meant to fail.

    Args:
        grace: seconds that the others may go on after the first failure; None: until `timeout`.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [Outcome(rank) for rank in range(world)]
        running: dict[Connection, tuple[Outcome, Any]] = {}
        for outcome in outcomes:
            ours, theirs = CONTEXT.Pipe(duplex=False)
            target = (function.__module__, function.__qualname__)
            group = (outcome.rank, world, folder, timeout)
            process = CONTEXT.Process(target=_rank, args=(theirs, target, group, args, env or {}))
            process.start()
            theirs.close()
            running[ours] = (outcome, process)
        processes = [process for _, process in running.values()]
        try:
            _collect(running, time.monotonic() + timeout, grace, Path(folder))
            for process in processes:  # after the result comes a barrier and the teardown
                process.join(10)
        finally:
            for process in processes:
                process.kill()
                process.join()
    for outcome, process in zip(outcomes, processes, strict=True):
        outcome.exit_code = process.exitcode
    return outcomes


def _collect(
    running: dict[Connection, tuple[Outcome, Any]],
    deadline: float,
    grace: float | None,
    folder: Path,
) -> None:
    """Fill the outcomes as they come; a closed pipe is a death, with the stacks of that moment."""
    while running:
        ready = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            for outcome, process in running.values():
                process.kill()
                outcome.error = "still running when the time was up, killed"
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            outcome, process = running.pop(connection)
            try:
                outcome.value, outcome.error = pickle.loads(connection.recv_bytes())
            except EOFError:
                process.join()
                stacks = folder / f"stacks-{outcome.rank}"
                written = stacks.read_text("utf-8") if stacks.exists() else ""
                outcome.error = f"died without a word: {_exit_text(process.exitcode)}\n{written}"
            if not outcome.succeeded and grace is not None:
                deadline = min(deadline, time.monotonic() + grace)


def _exit_text(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _rank(
    connection: Connection,
    target: tuple[str, str],
    group: tuple[int, int, str, float],
    args: tuple[Any, ...],
    env: dict[str, str],
) -> None:
    rank, world, folder, timeout = group
    faulthandler.enable(os.open(f"{folder}/stacks-{rank}", os.O_WRONLY | os.O_CREAT))
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in local.items()} | env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    value, error = None, ""
    try:
        if world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
        module, name = target
        value = getattr(import_module(module), name)(*args)
    except BaseException:
        error = traceback.format_exc()
    connection.send_bytes(pickle.dumps((value, error)))
    if world > 1 and not error:
        dist.barrier()  # a rank that tears down early breaks the others' last collective
        dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(1 if error else 0)
