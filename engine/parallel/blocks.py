"""What is applied to each repeated block: recomputation and compilation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from torch import nn

from ..errors import Problem, RecipeError, nearest
from ..recipe.tables import Compile, Memory

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout


def transform_blocks(
    model: LanguageModel, layout: Layout, memory: Memory, compile_: Compile
) -> None:
    """Make each block recompute its activations or compile, as the recipe says, in place.

    Module and parameter names stay as they are.

    Raises:
        RecipeError: torch.compile has no such backend.
    """
    if compile_.enabled:
        _require_backend(compile_.backend)
    for block in cast(nn.ModuleList, model.get_submodule(layout.blocks)):
        if memory.recompute == "full":
            from torch.utils.checkpoint import checkpoint

            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if compile_.enabled:
            block.compile(backend=compile_.backend, fullgraph=True)


def _require_backend(name: str) -> None:
    from torch import _dynamo

    known = _dynamo.list_backends(exclude_tags=None)
    if name not in known:
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise RecipeError([Problem(f"torch.compile has no {name!r}", "compile.backend", hint=hint)])
