"""`trainer explain`: the resolved recipe, and where each value came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ..engine.recipe.explain import explain as explain_recipe
from ..engine.recipe.load import load_recipe
from ..engine.recipe.shown import shown_value
from .options import AsJson, Overrides, Recipe
from .table import print_table


def explain(
    recipe: Recipe,
    overrides: Overrides = None,
    only: Annotated[
        str, typer.Option(metavar="TABLE", help="only this table, such as optimizer")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show a recipe with every default spelled out, and where each value comes from."""
    keys = explain_recipe(load_recipe(recipe, overrides or []))
    if only:
        keys = [each for each in keys if f"{each.key}.".startswith(f"{only}.")]
    if as_json:
        print(json.dumps([asdict(each) for each in keys], indent=1))
    else:
        print_table([(each.key, shown_value(each.value), each.origin) for each in keys])
