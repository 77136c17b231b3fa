"""`trainer list`: what a recipe can name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from pydantic import BaseModel

from ..engine.core.errors import RecipeError, nearest
from ..engine.recipe.documents.describe import describe, summary
from ..engine.recipe.documents.reference import tables
from ..engine.recipe.documents.starter import shipped_recipes
from ..engine.recipe.other_names import find_component
from ..engine.recipe.schema import REGISTRIES
from .complete import complete_component, complete_kind
from .options import AsJson
from .table import print_table


def list_components(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", autocompletion=complete_kind, help="such as optimizer, or table"
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", autocompletion=complete_component, help="one of that kind: its fields"
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the kinds of components, those of one kind, or the fields of one."""
    if name:
        _print_fields(kind, name, as_json)
    elif kind:
        _print(_summaries(kind), as_json)
    else:
        kinds = {each: ", ".join(REGISTRIES[each]) for each in REGISTRIES}
        kinds |= {"table": ", ".join(tables()), "recipe": ", ".join(shipped_recipes())}
        _print(kinds, as_json)


def _print(words: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(words, indent=1))
    else:
        print_table(list(words.items()))


def _print_fields(kind: str, name: str, as_json: bool) -> None:
    known = _summaries(kind)
    if name not in known:
        ours = find_component(kind, name)
        hint = f"here it is {ours}" if ours else nearest(name, known)
        hint = hint or f"known: {', '.join(known)}"
        raise RecipeError(f"no {kind} is named {name!r}", hint)
    if kind == "recipe":
        raise RecipeError(
            "a recipe has no fields", f"to start from it: trainer new PATH --from {name}"
        )
    configs = _configs(kind)
    fields = describe(configs[name])
    if as_json:
        print(json.dumps([asdict(field) for field in fields], indent=1))
        return
    print(f"{summary(configs[name])}\n")
    rows = [(field.key, field.type, field.default, field.description) for field in fields]
    print_table([("key", "type", "default", "description"), *rows])


def _summaries(kind: str) -> dict[str, str]:
    if kind == "recipe":
        return shipped_recipes()
    return {name: summary(config) for name, config in _configs(kind).items()}


def _configs(kind: str) -> dict[str, type[BaseModel]]:
    if kind == "table":
        return tables()
    if kind not in REGISTRIES:
        known = [*REGISTRIES, "table", "recipe"]
        hint = nearest(kind, known) or f"known: {', '.join(known)}"
        raise RecipeError(f"there is no kind {kind!r}", hint)
    return {name: REGISTRIES[kind][name] for name in REGISTRIES[kind]}
