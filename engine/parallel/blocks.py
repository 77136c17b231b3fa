"""What is applied to each repeated block: activation recomputation (Chen et al. 2016,
arXiv:1604.06174) and torch.compile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from functools import wraps
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ...kernels.torch_private import (
    CachedTorchDispatchMode,
    CachingTorchDispatchMode,
    current_dispatch_mode,
    pop_mode_temporarily,
)
from ...model_zoo.base import Model
from ...model_zoo.decoder import Block
from ...model_zoo.layers.moe import moe_layers
from ...model_zoo.layout import Layout
from .axis import ALONE, Sharing
from .selective import Contexts, selective_contexts
from .tables import Compile, Memory

Forward = Callable[..., Any]
Compiler = Callable[..., Forward]
"""compiles a function; further arguments are those of torch.compile"""


def transform_blocks(
    model: Model,
    layout: Layout,
    memory: Memory,
    compiler: Compiler | None,
    sharing: Sharing = ALONE,
    describe_block: Callable[[int], Hashable] = lambda number: None,
) -> None:
    """Make each block recompute its activations or compile, as the recipe says, in place.

    Module and parameter names stay as they are.

    Args:
        model: the model, before it is split over ranks.
        layout: where its blocks are.
        memory: the recipe's `[memory]`.
        compiler: compiles a block's forward pass; None: blocks are not compiled.
        sharing: how ranks will share the blocks.
        describe_block: returns what tells a block from blocks of another kind, by its number.

    Raises:
        RecipeError: torch has no such operation.
    """
    contexts, copies = None, dict[Hashable, CodeType]()
    if memory.recompute == "selective":
        # A compiled block keeps what its backward pass reads, however often that runs.
        is_read_twice = sharing.splits_backward and not compiler
        contexts = selective_contexts(memory.recompute_keep, is_read_twice=is_read_twice)
    # A model without blocks is compiled whole.
    for number, block in enumerate(layout.find_blocks(model) or [model]):
        has_regions = sharing.shares_experts and bool(moe_layers(block))
        # Torch cannot trace the recomputation of a block whose weights are DTensors: it goes around
        # the compiled block, but for a selective one, which must see its operations.
        outside = (sharing.splits_weights or has_regions) and contexts is None
        compile_kind = compiler and _compile_apart(compiler, describe_block(number), copies)
        if compile_kind and has_regions:
            compile_regions(block, compile_kind, contexts)
        # `forward` is replaced, not the module: torch.compile(module) is a wrapper that would put
        # `_orig_mod` into the names of parameters.
        elif compile_kind and outside:
            block.forward = compile_kind(block.forward)
        if memory.recompute in ("full", "every_n") or (contexts and not (compiler and has_regions)):
            recompute(block, number, memory, contexts)
        if compile_kind and not outside and not has_regions:
            block.forward = compile_kind(block.forward)
            if isinstance(block, Block) and block.dropping:
                set_keys_before(block)


def _compile_apart(
    compiler: Compiler, kind: Hashable, copies: dict[Hashable, CodeType]
) -> Compiler:
    """Return a compiler that gives blocks of one kind in one model their own recompile limit.

    Torch keeps what it compiles by code object, 8 versions each, and the kinds of blocks of a model
    share code. A model under training, its frozen reference, evaluations and rows of other lengths
    need some versions of each kind.

    Args:
        compiler: compiles a function.
        kind: blocks with the same kind share what is compiled.
        copies: the code objects of the model's kinds so far, which is extended.
    """

    def compile_copy(function: Any, **options: Any) -> Forward:
        plain = getattr(function, "__func__", function)
        if not isinstance(plain, FunctionType):  # of a plugin, such as a `functools.partial`
            return compiler(function, **options)
        code = copies.setdefault((kind, plain.__code__), plain.__code__.replace())
        copy = FunctionType(code, plain.__globals__, plain.__name__, None, plain.__closure__)
        copy.__defaults__, copy.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
        is_method = plain is not function
        return compiler(MethodType(copy, function.__self__) if is_method else copy, **options)

    return compile_copy


def set_keys_before(block: Block) -> None:
    """Let a compiled block find the keys of dropout in its layers, in place.

    torch.compile (2.13) refuses a recomputation that sets attributes. What it compiles saves the
    keys for the backward pass, so that they need not be set again.
    """
    compiled, block.sets_keys = block.forward, False

    @wraps(compiled)
    def run_with_keys(*args: Any, **kwargs: Any) -> Any:
        for layer in block.dropping:
            layer.dropout_keys = kwargs.get("dropout_keys")
        return compiled(*args, **kwargs)

    block.forward = run_with_keys  # type: ignore[method-assign] # as compiled blocks are


def compile_regions(block: nn.Module, compiler: Compiler, contexts: Contexts | None) -> None:
    """Compile what a block computes before, beside and after the exchange of tokens, in place.

    How many rows ranks send each other is known in Python alone, so the exchange is not compiled.

    Args:
        block: a block with experts.
        compiler: compiles a function.
        contexts: what `selective_contexts` returned: each region keeps some results and recomputes
            the others; None: regions are not recomputed.
    """
    for module, name, has_any_length in _regions(block):
        function = getattr(module, name)
        if contexts is not None:
            function = _recomputed(function, contexts)
        # Experts get another number of rows in each micro batch: one graph for all.
        options: dict[str, Any] = {"dynamic": True} if has_any_length else {}
        setattr(module, name, compiler(function, **options))


def _regions(block: nn.Module) -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield module and method of each region, and whether its number of rows is known late."""
    if isinstance(block, Block):
        yield block, "attend", False
    for layer in moe_layers(block).values():
        yield layer, "route", False
        if layer.shared is not None:
            yield layer.shared, "forward", False
        yield layer.experts, "compute", True
        yield layer, "merge", False


def open_compiler(
    compile_: Compile, memory: Memory, sharing: Sharing = ALONE, *, compiles_loss: bool = False
) -> Compiler | None:
    """Import torch's compiler if it is needed, and return what compiles a block's forward pass.

    Args:
        compile_: the recipe's `[compile]`.
        memory: the recipe's `[memory]`.
        sharing: how ranks will share blocks.
        compiles_loss: whether the loss is compiled, with blocks or without them.

    Returns:
        the function, or None where blocks are not compiled.

    Raises:
        RecipeError: torch.compile has no such backend or option.
        EnvironmentFault: others could write in the folder of torch.compile's cache, or this torch
            cannot compile for such a plan.
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
        return make_compiler(compile_, memory, sharing) if compile_.enabled else None
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
    block.forward = _recomputed(block.forward, contexts)


def _recomputed(function: Forward, contexts: Contexts | None) -> Forward:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    @wraps(function)
    def run_checkpointed(*args: Any, **kwargs: Any) -> Any:
        # The reentrant implementation takes neither keyword arguments nor a context_fn.
        return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)

    return run_checkpointed


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
