"""The recipe in a checkpoint."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ..checkpoint.manifest import Manifest
from ..core.errors import CheckpointError
from .schema import Recipe


def recipe_of(folder: Path, manifest: Manifest) -> Recipe:
    """Return a checkpoint's recipe; a tokenizer that lies in the checkpoint is found where it is.

    Args:
        folder: of the checkpoint, which may have been moved.

    Raises:
        CheckpointError: it does not fit this version, or needs plugins that are not imported.
    """
    content, table = manifest.recipe, manifest.recipe.get("tokenizer")
    if "tokenizer.json" in manifest.files and isinstance(table, dict):
        content = {**content, "tokenizer": {**table, "path": str(folder)}}
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first, plugins = error.errors()[0], content.get("plugins")
        modules = plugins.get("modules") if isinstance(plugins, dict) else None
        words = " ".join(f"--plugin {each}" for each in modules or [])
        raise CheckpointError(
            f"the recipe in {folder} does not fit this version: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            f"it was trained with plugins: add {words}" if words else "",
        ) from error
