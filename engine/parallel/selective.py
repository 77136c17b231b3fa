"""Selective recomputation: some operations' results are kept, and the others computed again."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ...kernels.torch_private import CachedTorchDispatchMode, OpOverloadPacket, dispatch_op_names
from ..core.errors import Problem, RecipeError, nearest
from .tables import GROUPS, HALF, operation_names

Contexts = Callable[[], Any]
"""Returns the contexts of a block's forward pass, and of its recomputation."""


def selective_contexts(words: list[str], *, is_read_twice: bool = False) -> Contexts:
    """Return contexts that keep the results of some operations and recompute the others.

    Args:
        words: of `tables.WORDS`, or full names such as "aten.mm.default".
        is_read_twice: whether the block is recomputed in two passes, for inputs and for weights;
            not for compiled blocks.

    Raises:
        RecipeError: torch has no such operation.
    """
    _kept_operations(tuple(words))  # unknown names are reported now
    # A partial of a function in a module: torch pickles it into the key of a compiled graph.
    contexts = partial(_make_contexts, tuple(words), is_read_twice)
    contexts.cache_hash = " ".join(words)  # type: ignore[attr-defined] # asked for by that cache
    return contexts


def _make_contexts(words: tuple[str, ...], is_read_twice: bool) -> Any:
    operations, halved = _kept_operations(words)
    # torch asks the policy in the forward pass and again in the recomputation, and both must decide
    # alike: each pass counts the block's matmuls from 0.
    seen = {False: 0, True: 0}  # by whether it is computed again

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operation in operations
        if operation in halved:
            seen[context.is_recompute] += 1
            keep = keep or seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    keep_results, read_results = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    if not is_read_twice:
        return keep_results, read_results
    return keep_results, _EachPass(read_results)


class _EachPass:
    """Lets each recomputation of a block find all results that its forward pass kept.

    torch gives out each result once (2.13), and holds them for as long as the autograd graph.

    Args:
        mode: torch's mode, whose `storage` has the results of each operation.
    """

    def __init__(self, mode: CachedTorchDispatchMode) -> None:
        self._mode, self._results = mode, mode.storage

    def __enter__(self) -> None:
        # A copy, because torch marks in it what it gave out.
        self._mode.storage = {key: copy(results) for key, results in self._results.items()}
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._mode.storage = {}


@cache
def _kept_operations(words: tuple[str, ...]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the operations that words stand for, and those of which every second one is kept."""
    operations = frozenset(
        operation for word in words for operation in _operations(word, optional=word in GROUPS)
    )
    return operations, frozenset(_operations("mm", optional=True)) if HALF in words else frozenset()


def _operations(word: str, optional: bool) -> list[Any]:
    """Return torch's objects; a group also names what some versions of torch do not have."""
    found = []
    for name in operation_names([word]):
        operation: Any = torch.ops
        try:
            for part in name.split("."):
                operation = getattr(operation, part)
        except AttributeError:
            if optional:
                continue
            raise RecipeError([_unknown(name)]) from None
        # A name without an overload, such as "aten.mm": torch dispatches overloads, never packets.
        if isinstance(operation, OpOverloadPacket):
            overloads: list[str] = operation.overloads()
            found += [getattr(operation, overload) for overload in overloads]
        else:
            found.append(operation)
    return found


def _unknown(name: str) -> Problem:
    known = [each.replace("::", ".") for each in dispatch_op_names()]
    known = [each if each.count(".") > 1 else f"{each}.default" for each in known]
    return Problem(
        f'torch has no operation "{name}"', "memory.recompute_keep", hint=nearest(name, known)
    )
