"""A trained model from a checkpoint, for sampling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError

if TYPE_CHECKING:
    from ..model_zoo.language_model import LanguageModel
    from .data.tokenizer import Tokenizer


def load_model(path: Path) -> tuple[LanguageModel, Tokenizer]:
    """Return the model and the tokenizer of a checkpoint, ready for generation.

    Args:
        path: a checkpoint, or a run directory, whose newest intact checkpoint is taken.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from .assemble import build_model, pick_device
    from .checkpoint.find import find_checkpoint
    from .checkpoint.reader import load_weights
    from .parallel.materialize import materialize
    from .recipe.load import recipe_from_values

    found = find_checkpoint(path)
    recipe = recipe_from_values(found.manifest.recipe)
    tokenizer = recipe.tokenizer.build()
    if tokenizer.fingerprint != found.manifest.tokenizer:
        raise CheckpointError(
            f"{found.path} was trained with another tokenizer than {recipe.tokenizer.name} is now",
            "restore the tokenizer's files as they were",
        )
    device = pick_device(0)
    built = build_model(recipe, tokenizer, device)
    materialize(built.model, device, seed=0, fill=False)
    load_weights(found.path, built.model)
    return built.model.eval(), tokenizer
