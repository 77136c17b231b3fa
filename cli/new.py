"""`trainer new`: a recipe to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..engine.assemble.found_model import describe_start
from ..engine.core.files import write_asked
from ..engine.recipe.documents.starter import shipped_recipes, starter
from .options import Force
from .table import echo


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
    from_hf: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Hugging Face folder, or id of the hub, whose model, sizes and tokenizer it "
            "takes, to train further",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Write a commented starter recipe."""
    replaced = describe_start(from_hf) if from_hf else None
    write_asked(path, starter(source, replaced, path.parent), replace=force)
    echo(f"{path} written; now: trainer validate {path}")
