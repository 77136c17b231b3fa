"""Starter recipes: those that are shipped, flattened and commented."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import RecipeError, nearest
from ...core.text.display import make_printable
from ...core.text.positions import KeyPath
from ..layers import read_layers
from ..load import leave_behind
from ..read import RECIPES
from ..schema import Recipe
from ..structure import describe_fields, given_tables
from ..write import format_toml
from .describe import summary


def shipped_recipes() -> dict[str, str]:
    """Return the names of the shipped recipes, each with its first comment."""
    return {
        path.stem: path.read_text("utf-8").partition("\n")[0].lstrip("# ")
        for path in sorted(RECIPES.glob("*.toml"))
    }


def starter(
    name: str,
    replaced: Mapping[str, Mapping[str, Any]] | None = None,
    folder: Path = Path(),
) -> str:
    """Return a shipped recipe merged with what it extends, with a comment at every key.

    Args:
        name: the shipped recipe.
        replaced: values in place of the recipe's by table: `model` and `tokenizer` are replaced as
            a whole, other tables by key.
        folder: where the recipe will lie; the path of the schema, for editors, starts there.

    Raises:
        RecipeError: no recipe of that name is shipped.
    """
    known = shipped_recipes()
    if name not in known:
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise RecipeError(f"no shipped recipe is named {name!r}", hint)
    tree = read_layers(RECIPES / f"{name}.toml")
    leave_behind(tree)
    written = tree.values
    # Without a name the run is called after the user's own file.
    written["run"].pop("name", None)
    for key, keys in (replaced or {}).items():
        kept = {} if key in ("model", "tokenizer") else written.get(key, {})
        written[key] = {**kept, **keys}
    return comment_toml(written, known[name], folder)


def comment_toml(written: Mapping[str, Any], title: str, folder: Path) -> str:
    """Return a recipe as TOML with a comment at every key.

    Args:
        written: the recipe as nested plain data.
        title: the first comment.
        folder: where the recipe will lie; the path of the schema, for editors, starts there.
    """
    values = {key: written[key] for key in Recipe.model_fields if key in written}
    comments: dict[KeyPath, str] = {}
    for table in given_tables(values):
        if table.path:
            comments[_without_index(table.path)] = summary(table.config)
        for key, text in describe_fields(table.config).items():
            comments.setdefault((*_without_index(table.path), key), text)
    text = format_toml(values, lambda path: comments.get(path, ""))
    schema = os.path.relpath(RECIPES.resolve() / "schema.json", folder.resolve())
    return f"# {make_printable(title)}\n#:schema {schema}\n\n{text}"


def _without_index(path: KeyPath) -> KeyPath:
    return tuple(part for part in path if isinstance(part, str))
