"""Where the parameters of a recipe's model lie. Torch-free."""

from __future__ import annotations

from ..lora.sizes import with_adapters
from ..parallel.mesh import Degrees
from ..parallel.placement import ShardPlacement, placements_for
from .schema import Recipe


def placements(recipe: Recipe, degrees: Degrees, vocab_size: int) -> list[ShardPlacement]:
    """Return where every parameter of a recipe's model lies, in the model's order.

    Empty for a model whose config does not know its parameters.

    Args:
        recipe: validated for these degrees.
        degrees: with -1 settled.
        vocab_size: of the tokenizer.
    """
    config = recipe.model.with_vocab(vocab_size)
    shapes = with_adapters(config, recipe.lora)
    return placements_for(shapes, config, recipe.parallel, degrees)
