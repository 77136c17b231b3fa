"""What is applied to each repeated block: recomputation and compilation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from torch import nn

from ..recipe.tables import Compile, Memory

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout


def transform_blocks(
    model: LanguageModel, layout: Layout, memory: Memory, compile_: Compile
) -> None:
    """Make each block recompute its activations or compile, as the recipe says, in place.

    Module and parameter names stay as they are.
    """
    for block in cast(nn.ModuleList, model.get_submodule(layout.blocks)):
        if memory.recompute == "full":
            from torch.utils.checkpoint import checkpoint

            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if compile_.enabled:
            block.compile(backend=compile_.backend, fullgraph=True)
