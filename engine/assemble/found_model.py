"""Finds a model on disk: a checkpoint, a run or a Hugging Face folder. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...model_zoo.heads import read_head
from ...model_zoo.sizes import SettingsError
from ..checkpoint.find import candidates, find_checkpoint
from ..checkpoint.manifest import Manifest
from ..core.errors import CheckpointError, nearest
from ..core.plugin_modules import require_plugins
from ..core.registry import models
from ..download.hub import MODEL_FILES, download, resolve_folder
from ..download.hub_ids import parse_hub_id
from ..formats.hf_folder import read_config
from ..recipe.changes import load_saved_recipe
from ..recipe.schema import Recipe
from ..tasks.classification.config import table_of_head

FOREIGN_SEQ_LEN = 2048
"""tokens a row for a Hugging Face folder, which does not say how long its training rows were"""
FURTHER_LR = 2e-5
"""learning rate of a recipe that trains a published model further"""


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
        path: a checkpoint, a run directory, whose newest intact checkpoint is taken, a Hugging Face
            folder, or the id of a model on the Hugging Face hub, which is downloaded.
        plugins: modules to import first. The plugins that a checkpoint names are not imported on
            its word: a checkpoint never runs code.

    Raises:
        CheckpointError: there is no model, it is damaged, or it needs a plugin.
        RecipeError: a plugin cannot be imported.
    """
    path = resolve_folder(path)
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
        # Predictions of further tokens are of training; transformers' folders hold none.
        settings = {**settings, "num_nextn_predict_layers": 0}
        config = types[model_type].from_hf_config(settings)
        table: dict[str, Any] = {
            "model": config.model_dump(),
            "tokenizer": {"name": "hf", "path": str(folder)},
        }
        if head := read_head(settings):
            table["task"] = table_of_head(head)
        recipe = Recipe.model_validate(table)
    except (SettingsError, ValidationError) as error:
        raise CheckpointError(
            f"{folder}: config.json does not describe a model: {error}"
        ) from error
    longest = getattr(recipe.model, "max_seq_len", FOREIGN_SEQ_LEN)
    data = recipe.data.model_copy(update={"seq_len": min(longest, FOREIGN_SEQ_LEN)})
    return recipe.model_copy(update={"data": data})


def describe_start(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a recipe that trains a published language model further.

    Args:
        folder: a Hugging Face folder, or the id of a model on the hub, which is downloaded.

    Raises:
        CheckpointError: the folder holds no language model that can be read, or no tokenizer.
    """
    place = str(folder.absolute())
    if wanted := parse_hub_id(folder):
        folder, pinned, _ = download(wanted, MODEL_FILES)
        place = str(pinned)
    settings = read_config(folder) if folder.is_dir() else None
    if settings is None:
        raise CheckpointError(f"{folder} has no config.json", "name a Hugging Face folder")
    recipe = _recipe_for_settings(folder, settings)
    if recipe.task.name != "language_modeling":
        raise CheckpointError(
            f"{folder} holds a model for {recipe.task.name}, no language model",
            f"start from a recipe of that task, and set run.init_from = {place!r}",
        )
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json", "save the tokenizer there")
    return {
        "run": {"init_from": place},
        "model": recipe.model.model_dump(mode="json", exclude_none=True),
        "tokenizer": {"name": "hf", "path": place},
        "data": {"seq_len": recipe.data.seq_len},
        # Pretrained weights bear a hundredth of the rate that starts a model.
        "optimizer": {"lr": FURTHER_LR},
    }
