"""What is applied to each repeated block: recomputation and compilation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..core.errors import Problem, RecipeError, nearest
from .tables import Compile, Memory

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout


def transform_blocks(
    model: LanguageModel,
    layout: Layout,
    memory: Memory,
    compile_: Compile,
    *,
    is_split: bool = False,
) -> None:
    """Make each block recompute its activations or compile, as the recipe says, in place.

    Module and parameter names stay as they are.

    Args:
        model: whose blocks are transformed.
        layout: where they are.
        memory: the recipe's table.
        compile_: the recipe's table.
        is_split: tensor parallelism will split their weights.

    Raises:
        RecipeError: torch.compile has no such backend, or torch no such operation.
    """
    backend = _backend(memory, compile_) if compile_.enabled else None
    contexts = None
    if memory.recompute == "selective":
        from .recompute import kept

        contexts = kept(memory.recompute_keep)
    # Torch cannot trace the recomputation of a block whose weights are DTensors: it goes around the
    # compiled block, but for a selective one, which must see its operations.
    outside = is_split and contexts is None
    for number, block in enumerate(cast(nn.ModuleList, model.get_submodule(layout.blocks))):
        compiled = partial(torch.compile, backend=backend, fullgraph=True) if backend else None
        if compiled and outside:
            block.forward = compiled(block.forward)
        if memory.recompute in ("full", "every_n", "selective"):
            from .recompute import recompute

            recompute(block, number, memory, contexts)
        if compiled and not outside:
            block.forward = compiled(block.forward)


def _backend(memory: Memory, compile_: Compile) -> str | Callable[..., Any]:
    """Return a backend of torch.compile with this run's options, which no other run sees."""
    _require_backend(compile_.backend)
    if memory.recompute != "budget":
        return compile_.backend
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    compile_graph = lookup_backend(compile_.backend)

    def compile_within_budget(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=memory.recompute_budget):
            return compile_graph(graph, inputs)

    return compile_within_budget


def _require_backend(name: str) -> None:
    from torch import _dynamo

    known = _dynamo.list_backends(exclude_tags=None)
    if name not in known:
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise RecipeError([Problem(f"torch.compile has no {name!r}", "compile.backend", hint=hint)])
