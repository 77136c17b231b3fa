"""What is applied to each repeated block: activation recomputation (Chen et al. 2016,
arXiv:1604.06174) and torch.compile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...kernels.torch_private import (
    CachedTorchDispatchMode,
    CachingTorchDispatchMode,
    OpOverloadPacket,
    current_dispatch_mode,
    dispatch_op_names,
    pop_mode_temporarily,
)
from ...model_zoo.base import Model
from ...model_zoo.layout import Layout
from ..core.errors import Problem, RecipeError, nearest
from .tables import GROUPS, HALF, Compile, Memory, operation_names

Forward = Callable[..., Any]
Compiler = Callable[[Forward], Forward]


def transform_blocks(
    model: Model,
    layout: Layout,
    memory: Memory,
    compiler: Compiler | None,
    *,
    is_split: bool = False,
) -> None:
    """Make each block recompute its activations or compile, as the recipe says, in place.

    Module and parameter names stay as they are.

    Args:
        model: the model, before it is split over ranks.
        layout: where its blocks are.
        memory: the recipe's `[memory]`.
        compiler: compiles a block's forward pass; None: blocks are not compiled.
        is_split: whether tensor parallelism will split the blocks' weights.

    Raises:
        RecipeError: torch has no such operation.
    """
    contexts = None
    if memory.recompute == "selective":
        contexts = selective_contexts(memory.recompute_keep)
    # Torch cannot trace the recomputation of a block whose weights are DTensors: it goes around the
    # compiled block, but for a selective one, which must see its operations.
    outside = is_split and contexts is None
    # A model without blocks is compiled whole.
    for number, block in enumerate(layout.find_blocks(model) or [model]):
        # `forward` is replaced, not the module: torch.compile(module) is a wrapper that would put
        # `_orig_mod` into the names of parameters.
        if compiler and outside:
            block.forward = compiler(block.forward)
        if memory.recompute in ("full", "every_n", "selective"):
            recompute(block, number, memory, contexts)
        if compiler and not outside:
            block.forward = compiler(block.forward)


def open_compiler(
    compile_: Compile, memory: Memory, *, compiles_loss: bool = False
) -> Compiler | None:
    """Import torch's compiler if it is needed, and return what compiles a block's forward pass.

    Args:
        compile_: the recipe's `[compile]`.
        memory: the recipe's `[memory]`.
        compiles_loss: whether the loss is compiled, with blocks or without them.

    Returns:
        the function, or None where blocks are not compiled.

    Raises:
        RecipeError: torch.compile has no such backend or option.
        EnvironmentFault: others could write in the folder of torch.compile's cache.
    """
    if not (compile_.enabled or compiles_loss):
        return None
    # Modules live as long as the process: a collector that goes through them again and again takes
    # a third of the time of this import.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        from .compiler import make_compiler, open_cache

        if compiles_loss:  # by inductor, whatever the backend of blocks is
            open_cache(compile_.cache_dir)
        return make_compiler(compile_, memory) if compile_.enabled else None
    finally:
        if is_collecting:
            gc.enable()


def recompute(block: nn.Module, number: int, memory: Memory, contexts: Contexts | None) -> None:
    """Make a block recompute its activations in the backward pass, if the recipe says so, in place.

    Args:
        block: the block whose `forward` is replaced.
        number: the block's number in the model.
        memory: the recipe's table.
        contexts: what `selective_contexts` returned, for "selective".
    """
    if memory.recompute == "every_n" and number % memory.recompute_interval:
        return
    forward = block.forward
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def run_checkpointed(*args: Any, **kwargs: Any) -> Any:
        # The reentrant implementation takes neither keyword arguments nor a context_fn.
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = run_checkpointed


def hide_hooks_from_checkpointing(module: nn.Module) -> None:
    """Let the hooks of a module inside a block run outside of selective checkpointing, in place.

    FSDP's hooks do not run the same operations when the block is recomputed, so that torch's cache
    of saved results would return those of other operations.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = _without_checkpointing(hook)


def _without_checkpointing(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = current_dispatch_mode()
        is_active = isinstance(mode, (CachingTorchDispatchMode, CachedTorchDispatchMode))
        with pop_mode_temporarily() if is_active else nullcontext():
            return hook(*args, **kwargs)

    return run


Contexts = Callable[[], Any]
"""Returns the contexts of a block's forward pass, and of its recomputation."""


def selective_contexts(words: list[str]) -> Contexts:
    """Return contexts that keep the results of some operations and recompute the others.

    Args:
        words: of `tables.WORDS`, or full names such as "aten.mm.default".

    Raises:
        RecipeError: torch has no such operation.
    """
    _kept_operations(tuple(words))  # unknown names are reported now
    # A partial of a function in a module: torch pickles it into the key of a compiled graph.
    contexts = partial(_make_contexts, tuple(words))
    contexts.cache_hash = " ".join(words)  # type: ignore[attr-defined] # asked for by that cache
    return contexts


def _make_contexts(words: tuple[str, ...]) -> Any:
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

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


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
