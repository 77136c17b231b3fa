"""`trainer validate`: check recipes without training."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import ExitCode, Problem, RecipeError
from ..engine.recipe.assets import find_missing_assets
from ..engine.recipe.load import load_recipe
from .options import AsJson, Offline, Overrides
from .table import echo, print_warnings


def validate(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="TOML files")],
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="check for this number of ranks")
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Check recipes: every problem at once, with file, line and key.

    Files that do not exist are warned about; with --offline they are errors.
    """
    found = {str(path): _problems(path, overrides or [], world, offline) for path in recipes}
    if as_json:
        report = [
            {
                "recipe": path,
                "valid": not problems,
                "problems": [asdict(each) for each in problems],
                "warnings": [asdict(each) for each in warnings],
            }
            for path, (problems, warnings) in found.items()
        ]
        print(json.dumps(report, indent=1))
    else:
        for path, (problems, warnings) in found.items():
            for problem in problems:
                print(problem.render(), file=sys.stderr)
            print_warnings(warnings)
            if not problems:
                echo(f"{path}: valid")
    if any(problems for problems, _ in found.values()):
        raise typer.Exit(ExitCode.RECIPE)


def _problems(
    path: Path, overrides: list[str], world: int | None, offline: bool
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems of a recipe, and what is warned about."""
    try:
        recipe = load_recipe(path, overrides, world)
        for text in recipe.warnings:
            echo(f"warning: {text}", err=True)
        missing = find_missing_assets(recipe, offline=offline)
    except RecipeError as error:
        return error.problems, []
    return (missing, []) if offline else ([], missing)
