"""`trainer download`: a model of the Hugging Face hub, into its cache or a folder. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import RecipeError
from ..engine.core.files import require_path
from ..engine.core.text.display import format_value
from ..engine.download.hub import MODEL_FILES, describe_files
from ..engine.download.hub import download as download_model
from ..engine.download.hub_ids import read_hub_id
from .options import AsJson
from .table import echo


def download(
    model: Annotated[
        str, typer.Argument(metavar="ID", help="such as Qwen/Qwen3-0.6B, or ID@REVISION")
    ],
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="such as assets/qwen3; default: the hub's cache"),
    ] = None,
    revision: Annotated[str, typer.Option(help="commit, tag or branch; default: the newest")] = "",
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="files to download, such as '*.gguf' or 'original/*'; default: the configuration, "
            "safetensors and tokenizer files of the top folder",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a model; an interrupted download resumes, and every file's checksum is compared."""
    text = f"{model.partition('@')[0]}@{revision}" if revision else model
    wanted = read_hub_id(text)
    if wanted is None:
        raise RecipeError(
            f"{format_value(text)} is no id of the Hugging Face hub", "such as Qwen/Qwen3-0.6B"
        )
    if to is not None:
        require_path(to)
    done = download_model(wanted, include or MODEL_FILES, to and to.expanduser(), check_all=True)
    if as_json:
        files = [file._asdict() for file in done.files]
        facts = {"folder": str(done.folder), "id": str(done.id), "files": files}
        typer.echo(json.dumps(facts, indent=2))
        return
    echo(f"{done.folder}: {describe_files(done.files)}, checksums compared")
    echo(f"pinned: {done.id}")
