"""Texts to evaluate on, named on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ..core.errors import RecipeError, nearest
from ..core.text.tree import Origin, Tree
from ..recipe.layers import apply_override
from ..recipe.messages import problems_of
from ..recipe.schema import Recipe
from ..sources.files import source_kind

if TYPE_CHECKING:
    from ..sources.configs import SourceConfig


def source_of(name: str, settings: Sequence[str]) -> SourceConfig:
    """Return a source.

    Args:
        name: as in a recipe's `[[data.sources]]`.
        settings: `key=value` for its other keys.

    Raises:
        RecipeError: it has no such key, or no such value.
    """
    from ..sources.configs import sources

    if name not in sources:
        raise RecipeError(f'no source is named "{name}"', nearest(name, sources))
    tree = Tree({"data": {"sources": [{"name": name}]}}, {(): Origin("--source")})
    for setting in settings:
        apply_override(tree, f"data.sources.0.{setting}")
    try:
        return Recipe.model_validate(tree.values).data.sources[0]
    except ValidationError as error:
        raise RecipeError(problems_of(error, tree)) from None


def source_of_path(path: str) -> SourceConfig:
    """Return the source that reads a file, a folder or a glob, by how its files are named."""
    return source_of(source_kind(path), [f"path={json.dumps(path)}"])
