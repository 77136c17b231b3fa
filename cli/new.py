"""`trainer new`: a recipe to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..engine.errors import RecipeError
from ..engine.files import write_asked
from ..engine.recipe.starter import shipped_recipes, starter


def new(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="the file to write")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NAME",
            autocompletion=lambda: list(shipped_recipes()),
            help="the shipped recipe to start from; `trainer list recipe` shows them",
        ),
    ] = "quickstart",
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
) -> None:
    """Write a commented starter recipe."""
    text = starter(source)
    if path.exists() and not force:
        raise RecipeError(f"{path} is there already", "give another path, or --force")
    write_asked(path, text)
    print(f"{path} written; now: trainer validate {path}")
