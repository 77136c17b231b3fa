"""Finds the model and the texts that a command names, before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...model_zoo.config import SettingsError, read_sizes
from ..checkpoint.find import candidates, find_checkpoint
from ..checkpoint.manifest import Manifest
from ..core.errors import CheckpointError, RecipeError, nearest
from ..core.plugin_modules import require_plugins
from ..core.registry import models
from ..core.text.tree import Origin, Tree
from ..formats.hf_folder import read_config
from ..recipe.changes import load_saved_recipe
from ..recipe.layers import apply_override
from ..recipe.messages import problems_of
from ..recipe.schema import Recipe
from ..sources.configs import SourceConfig, sources
from ..sources.files import infer_source

FOREIGN_SEQ_LEN = 2048
"""tokens a row for a Hugging Face folder, which does not say how long its training rows were"""


class Weights(StrEnum):
    """The weights of a checkpoint that are read."""

    MODEL = "model"
    EMA = "ema"


class Dtype(StrEnum):
    """The dtype that a model computes in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@dataclass(frozen=True)
class FoundModel:
    """A model on disk that has not been read yet.

    Attributes:
        path: the checkpoint or the Hugging Face folder.
        recipe: the checkpoint's recipe; for a Hugging Face folder only `model` and `tokenizer` are
            known, and the rest are defaults.
        manifest: the checkpoint's manifest; None for a Hugging Face folder.
    """

    path: Path
    recipe: Recipe
    manifest: Manifest | None


def find_model(path: str | Path, plugins: Sequence[str] = ()) -> FoundModel:
    """Find the model at a path.

    Args:
        path: a checkpoint, a run directory, whose newest intact checkpoint is taken, or a Hugging
            Face folder.
        plugins: modules to import first. The plugins that a checkpoint names are not imported on
            its word: a checkpoint never runs code.

    Raises:
        CheckpointError: there is no model, it is damaged, or it needs a plugin.
        RecipeError: a plugin cannot be imported.
    """
    path = Path(path)
    require_plugins(plugins)
    settings = None if not path.is_dir() or candidates(path) else read_config(path)
    if settings is not None:
        return FoundModel(path, _recipe_for_settings(path, settings), None)
    found = find_checkpoint(path)
    return FoundModel(found.path, load_saved_recipe(found.path, found.manifest), found.manifest)


def _recipe_for_settings(folder: Path, settings: dict[str, Any]) -> Recipe:
    """Return a recipe with the model that config.json of a Hugging Face folder describes."""
    types = {
        model_type: models[name]
        for name in models
        for model_type in models[name].layout.hf_possible.get("model_type", ())
    }
    model_type = str(settings.get("model_type"))
    if model_type not in types:
        raise CheckpointError(
            f'{folder} is of a model of type "{model_type[:80]}"; known: {", ".join(types)}',
            nearest(model_type, types),
        )
    try:
        sizes = read_sizes(settings, types[model_type])
        recipe = Recipe.model_validate(
            {"model": sizes, "tokenizer": {"name": "hf", "path": str(folder)}}
        )
    except (SettingsError, ValidationError) as error:
        raise CheckpointError(
            f"{folder}: config.json does not describe a model: {error}"
        ) from error
    longest = getattr(recipe.model, "max_seq_len", FOREIGN_SEQ_LEN)
    data = recipe.data.model_copy(update={"seq_len": min(longest, FOREIGN_SEQ_LEN)})
    return recipe.model_copy(update={"data": data})


def find_source(name: str, settings: Sequence[str]) -> SourceConfig:
    """Build a source from a name and settings.

    Args:
        name: the `name` of a source in a recipe's `[[data.sources]]`.
        settings: `key=value` for the other keys of the source.

    Raises:
        RecipeError: no source has this name, or a key or value is invalid.
    """
    if name not in sources:
        raise RecipeError(f'no source is named "{name}"', nearest(name, sources))
    tree = Tree({"data": {"sources": [{"name": name}]}}, {(): Origin("--source")})
    for setting in settings:
        apply_override(tree, f"data.sources.0.{setting}")
    try:
        return Recipe.model_validate(tree.values).data.sources[0]
    except ValidationError as error:
        raise RecipeError(problems_of(error, tree)) from None


def find_texts(path: str) -> SourceConfig:
    """Return the source that reads a file, a folder or a glob, chosen by file names."""
    return find_source(infer_source(path), [f"path={json.dumps(path)}"])
