"""`trainer migrate`: a recipe from another trainer's settings. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..engine.assemble.found_model import describe_start
from ..engine.core.files import write_asked
from ..engine.recipe.documents.starter import comment_toml
from ..engine.recipe.migrate.migrate import migrate as migrate_settings
from ..engine.recipe.migrate.settings import read_settings
from .options import AsJson, Force
from .table import echo, print_table


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="torchtitan's TOML, or YAML of Trainer, TRL or axolotl"
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="the file to write; default: FILE-recipe.toml"),
    ] = None,
    from_hf: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Hugging Face folder, or id of the hub, of the model that is trained further",
        ),
    ] = None,
    world: Annotated[
        int,
        typer.Option(min=1, max=2**20, help="data-parallel ranks; their batches are added up"),
    ] = 1,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a valid recipe from another trainer's settings, and list those not carried over."""
    started = describe_start(from_hf) if from_hf else None
    found = migrate_settings(read_settings(file), file, world, started)
    to = to or Path(f"{file.stem}-recipe.toml")
    write_asked(to, comment_toml(found.values, f"Made from {file.name}", to.parent), replace=force)
    if as_json:
        left = [{"setting": name, "reason": reason} for name, reason in found.left]
        typer.echo(
            json.dumps({"recipe": str(to), "carried": found.carried, "left": left}, indent=1)
        )
        return
    echo(f"{to} written: valid, from {found.carried} settings; now: trainer explain {to}")
    if found.left:
        echo("not carried over:")
        print_table([[f"  {name}", reason] for name, reason in found.left])
