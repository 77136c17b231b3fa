"""`trainer validate`: check recipes without training."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import ExitCode, Problem, RecipeError
from ..engine.recipe.load import load_recipe
from .options import AsJson, Overrides
from .table import echo


def validate(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="TOML files")],
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="check for this number of ranks")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check recipes: every problem at once, with file, line and key."""
    found = {str(path): _problems(path, overrides or [], world) for path in recipes}
    if as_json:
        report = [
            {"recipe": path, "valid": not problems, "problems": [asdict(each) for each in problems]}
            for path, problems in found.items()
        ]
        print(json.dumps(report, indent=1))
    else:
        for path, problems in found.items():
            for problem in problems:
                print(problem.render(), file=sys.stderr)
            if not problems:
                echo(f"{path}: valid")
    if any(found.values()):
        raise typer.Exit(ExitCode.RECIPE)


def _problems(path: Path, overrides: list[str], world: int | None) -> list[Problem]:
    try:
        for text in load_recipe(path, overrides, world).warnings:
            echo(f"warning: {text}", err=True)
    except RecipeError as error:
        return error.problems
    return []
