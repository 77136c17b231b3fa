"""Texts to evaluate on, named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ..errors import RecipeError, nearest
from ..recipe.messages import problems_of
from ..recipe.overrides import apply_override
from ..recipe.schema import Recipe
from ..recipe.tree import Origin, Tree

if TYPE_CHECKING:
    from ..data.configs import SourceConfig

BY_SUFFIX = {".jsonl": "jsonl", ".parquet": "parquet"}


def source_of(name: str, settings: Sequence[str]) -> SourceConfig:
    """Return a source.

    Args:
        name: as in a recipe's `[[data.sources]]`.
        settings: `key=value` for its other keys.

    Raises:
        RecipeError: it has no such key, or no such value.
    """
    from ..data.configs import sources

    if name not in sources:
        raise RecipeError(f'no source is named "{name}"', nearest(name, sources))
    tree = Tree({"data": {"sources": [{"name": name}]}}, {(): Origin("--source")})
    for setting in settings:
        apply_override(tree, f"data.sources.0.{setting}")
    try:
        return Recipe.model_validate(tree.values).data.sources[0]
    except ValidationError as error:
        raise RecipeError(problems_of(error, tree)) from None


def source_of_file(path: Path) -> SourceConfig:
    """Return the source that reads a file: by its ending, else as one text.

    Raises:
        RecipeError: there is no such file.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: no such file", "a folder or a glob: --source text --set path=")
    name = BY_SUFFIX.get(path.suffix.lower(), "text")
    return source_of(name, [f"path={path}"])
