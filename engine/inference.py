"""A trained model from a checkpoint, for sampling."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from .errors import CheckpointError

if TYPE_CHECKING:
    from ..model_zoo.language_model import LanguageModel
    from .checkpoint.find import Found
    from .data.tokenizer import Tokenizer
    from .recipe.schema import Recipe


def load_model(path: Path, plugins: Sequence[str] = ()) -> tuple[LanguageModel, Tokenizer]:
    """Return the model and the tokenizer of a checkpoint, ready for generation.

    Args:
        path: a checkpoint, or a run directory, whose newest intact checkpoint is taken.
        plugins: modules to import first. Those that the checkpoint names are not imported on its
            word: a checkpoint never runs code.

    Raises:
        CheckpointError: there is none, it is damaged, or it needs a plugin.
    """
    from .assemble import build_model, pick_device
    from .checkpoint.find import find_checkpoint
    from .checkpoint.reader import load_weights
    from .launch.environment import World
    from .lora.merge import merge_adapters
    from .parallel.materialize import materialize

    for module in plugins:
        import_module(module)
    found = find_checkpoint(path)
    recipe = _saved_recipe(found)
    tokenizer = recipe.tokenizer.build()
    if tokenizer.fingerprint != found.manifest.tokenizer:
        raise CheckpointError(
            f"{found.path} was trained with another tokenizer than {recipe.tokenizer.name} is now",
            "restore the tokenizer's files as they were",
        )
    device = pick_device(World())
    built = build_model(recipe, tokenizer, device)
    materialize(built.model, device, seed=0, fill=False)
    load_weights(found.path, built.model)
    merge_adapters(built.model)
    for parameter in built.model.parameters():  # once, instead of for every token
        parameter.data = parameter.data.to(built.model.compute_dtype)
    return built.model.eval(), tokenizer


def _saved_recipe(found: Found) -> Recipe:
    from .recipe.schema import Recipe

    try:
        return Recipe.model_validate(found.manifest.recipe)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        modules = found.manifest.recipe.get("plugins", {}).get("modules", [])
        hint = f"it was trained with plugins: add --plugin {' --plugin '.join(modules)}"
        raise CheckpointError(
            f"the recipe in {found.path} does not fit this version: {key}: {first['msg']}",
            hint if modules else "",
        ) from error
