"""Processes that live as long as the tests, and run functions as the ranks of many small groups."""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from tests.distributed import CONTEXT
from tests.known_bugs.catalogue import mistaken

SECONDS = 60
_ranks: list[tuple[Connection, Any]] = []
_mistake: tuple[str, str] | None = None
_alone: dict[str, Any] = {}


def set_mistake(mistake: tuple[str, str] | None) -> None:
    """Say which entry's mistake, (subject, name), the ranks of later calls have; None: none."""
    global _mistake
    _mistake = mistake


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(*args)` returns on each rank of a gloo group, with the set mistake.

    Raises:
        AssertionError: a rank asserted something else.
        RuntimeError: a rank raised anything else, or did not answer.
    """
    return _run(world, _mistake, function, args)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return what one process without any mistake finds, computed once."""
    key = repr((function, args))
    if key not in _alone:
        (_alone[key],) = _run(1, None, function, args)
    return _alone[key]


def _run(world: int, mistake: Any, function: Callable[..., Any], args: Any) -> list[Any]:
    while len(_ranks) < world:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(theirs, len(_ranks)), daemon=True)
        process.start()
        theirs.close()
        _ranks.append((ours, process))
    target = function.__module__, function.__qualname__
    with tempfile.TemporaryDirectory() as folder:
        for pipe, _ in _ranks[:world]:
            pipe.send_bytes(pickle.dumps((world, folder, mistake, target, args)))
        answers = [_receive(pipe) for pipe, _ in _ranks[:world]]
    values, kinds, texts = zip(*answers, strict=True)
    if failures := [text for kind, text in zip(kinds, texts, strict=True) if kind == "error"]:
        stop_ranks()  # others may still wait in a collective
        raise RuntimeError("\n".join(failures))
    if "assertion" in kinds:
        raise AssertionError("\n".join(texts))
    return list(values)


def _receive(pipe: Connection) -> tuple[Any, str, str]:
    if not pipe.poll(SECONDS):
        return None, "error", "a rank did not answer"
    try:
        answer: tuple[Any, str, str] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "error", "a rank died"
    return answer


@atexit.register
def stop_ranks() -> None:
    """End the processes; the next call starts others."""
    for pipe, process in _ranks:
        process.kill()
        process.join()
        pipe.close()
    _ranks.clear()


def _serve(pipe: Connection, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            world, folder, mistake, target, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(rank, world, folder, mistake, target, args)))


def _answer(
    rank: int, world: int, folder: str, mistake: Any, target: tuple[str, str], args: Any
) -> tuple[Any, str, str]:
    import torch.distributed as dist

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in places.items()})
    try:
        if world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=SECONDS / 2),
            )
        module, name = target
        with mistaken(*mistake) if mistake else nullcontext():
            value = getattr(import_module(module), name)(*args)
        if world > 1:
            dist.barrier()  # a rank that tears down early breaks the others' last collective
    except AssertionError:
        return None, "assertion", traceback.format_exc()
    except BaseException:
        return None, "error", traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return value, "value", ""
