"""`trainer explain`: the resolved recipe, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from ..engine.core.errors import RecipeError, nearest
from ..engine.core.text.display import format_value
from ..engine.recipe.load import load_recipe
from ..engine.recipe.write import Explained
from ..engine.recipe.write import explain as explain_recipe
from .options import AsJson, Overrides, Recipe
from .table import print_table


def explain(
    recipe: Recipe,
    overrides: Overrides = None,
    only: Annotated[
        str, typer.Option(metavar="TABLE", help="only this table or key, such as optimizer")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show a recipe with every default spelled out, and where each value comes from."""
    keys = explain_recipe(load_recipe(recipe, overrides or []))
    if only:
        keys = _below(only, keys)
    if as_json:
        print(json.dumps([asdict(each) for each in keys], indent=1))
    else:
        print_table([(each.key, format_value(each.value), each.origin) for each in keys])


def _below(table: str, keys: Sequence[Explained]) -> list[Explained]:
    """Return the key of this name, or those of the table.

    Raises:
        RecipeError: the recipe has neither.
    """
    found = [each for each in keys if f"{each.key}.".startswith(f"{table}.")]
    if not found:
        tables = dict.fromkeys(each.key.partition(".")[0] for each in keys)
        hint = nearest(table, [*tables, *(each.key for each in keys)])
        raise RecipeError(f"--only: the recipe has no {table!r}", hint)
    return found
