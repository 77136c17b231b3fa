"""Finds the texts that a command names, before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum

from pydantic import ValidationError

from ...model_zoo.config import ModelConfig
from ..core.errors import RecipeError, nearest
from ..core.text.tree import Origin, Tree
from ..recipe.checks.task_checks import reason_for_no_text
from ..recipe.layers import apply_override
from ..recipe.messages import problems_of
from ..recipe.schema import Recipe
from ..sources.configs import SourceConfig, sources
from ..sources.files import infer_source
from ..tasks.tables import TaskConfig


class Weights(StrEnum):
    """The weights of a checkpoint that are read."""

    MODEL = "model"
    EMA = "ema"


class Dtype(StrEnum):
    """The dtype that a model computes in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class OnLong(StrEnum):
    """What happens to a record of more tokens than fit."""

    ERROR = "error"
    TRUNCATE = "truncate"


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


def find_texts(path: str, settings: Sequence[str] = ()) -> SourceConfig:
    """Return the source that reads a file, a folder or a glob, chosen by file names.

    Args:
        path: the file, folder or glob.
        settings: `key=value` for the other keys of the source.
    """
    return find_source(infer_source(path), [f"path={json.dumps(path)}", *settings])


def find_data(
    paths: Sequence[str], source: str, settings: Sequence[str]
) -> list[tuple[str, SourceConfig]]:
    """Return the sources that a command names, each with its name in messages.

    Args:
        paths: files, folders and globs.
        source: the name of a source; empty: there is none.
        settings: `key=value` of the source, or of the sources of the paths.

    Raises:
        RecipeError: no source has this name, or a key or value is invalid.
    """
    if settings and not source and not paths:
        raise RecipeError("--set without --data or --source", "name the source whose key it is")
    found = [(path, find_texts(path, () if source else settings)) for path in paths]
    return [*found, (source, find_source(source, settings))] if source else found


def require_generation(model: ModelConfig, task: TaskConfig | None = None) -> None:
    """Refuse a model that does not predict the next token from those before it.

    Args:
        model: the config of the model.
        task: what it was trained for; None: some language model's task.

    Raises:
        RecipeError: it generates no text; the hint names what to use instead.
    """
    if reason := reason_for_no_text(model, task is None or task.needs_language_model):
        hint = "`trainer infer` writes the predictions of its task"
        raise RecipeError(f"{reason}: it generates no text", hint)
