"""Options of the commands that open a trained model. Apart from `options`: these load recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..engine.inference import inputs

TrainedModel = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="a checkpoint, a run directory (its newest), a Hugging Face folder, or an id of the "
        "hub, such as Qwen/Qwen3-0.6B",
    ),
]
DataPaths = Annotated[
    list[str] | None,
    typer.Option("--data", help="a file, folder or glob of text, .jsonl or .parquet; or more"),
]
SourceName = Annotated[str, typer.Option("--source", help="a source by its name in recipes")]
SourceSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="a key of the source, or of the data's sources"
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(min=1, max=2**24, help="tokens a row or record; default: as in training"),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size", "--batch", min=1, max=2**16, help="rows or records computed together"
    ),
]
Weights = Annotated[
    inputs.Weights, typer.Option(help='"ema": the averaged weights that [ema] keeps')
]
Dtype = Annotated[
    inputs.Dtype | None, typer.Option(help="what to compute in; default: as in training")
]
