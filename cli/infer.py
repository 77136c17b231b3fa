"""`trainer infer`: predictions of any task, one JSON object a record."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.assemble.found_model import FoundModel, find_model
from ..engine.core.errors import RecipeError
from ..engine.inference import inputs
from ..engine.inference.prediction_file import PredictionFile, encode_line
from .model_options import (
    BatchSize,
    DataPaths,
    Dtype,
    SeqLen,
    SourceName,
    SourceSettings,
    TrainedModel,
    Weights,
)
from .options import Force, Plugins
from .ranks import NumProcesses, run_on_ranks

if TYPE_CHECKING:
    from ..engine.inference.record_batches import RecordBatches


def infer(
    context: typer.Context,
    checkpoint: TrainedModel,
    data: DataPaths = None,
    source: SourceName = "",
    settings: SourceSettings = None,
    output: Annotated[
        Path | None, typer.Option(help="a file, continued if it is there; default: standard output")
    ] = None,
    force: Force = False,
    echo: Annotated[
        list[str] | None, typer.Option(help="a field of the record to repeat; again for more")
    ] = None,
    batch_size: BatchSize = 8,
    seq_len: SeqLen = None,
    on_long: Annotated[
        inputs.OnLong | None, typer.Option(help="a longer record; default: as in training")
    ] = None,
    weights: Weights = inputs.Weights.MODEL,
    dtype: Dtype = None,
    plugin: Plugins = None,
    nproc: NumProcesses = 1,
) -> None:
    """Predict records with the task of a run; lines have the order of the records."""
    if force and output is None:
        raise RecipeError("--force without --output", "name the file to begin again")
    run_on_ranks(context, nproc)
    found = find_model(checkpoint, plugin or [])  # errors come before torch is imported
    sources = inputs.find_data(data or [], source, settings or [])
    if not sources:
        raise RecipeError("nothing to predict", "name records with --data or --source")
    from ..engine.inference.infer import InferOptions, open_records, predict
    from ..engine.inference.open import join_ranks, open_found
    from ..engine.inference.score import gather_objects

    recipe = found.recipe
    options = InferOptions(
        batch_size, seq_len, on_long.value if on_long else None, tuple(echo or ())
    )
    with join_ranks() as world:
        tokenizer = recipe.tokenizer.build()
        records = [each for _, each in sources]
        batches = open_records((recipe.task, recipe.loss), recipe.data, tokenizer, records, options)
        origin = _describe_origin(found, batches, weights, dtype)
        with closing(_Target(output if world.rank == 0 else None, origin, replace=force)) as target:
            # Rank 0 alone has the file.
            num_done = gather_objects(target.num_lines)[0]
            opened = open_found(found, weights=weights, dtype=dtype, world=world, is_sharded=True)
            target.write_all(predict(opened, batches, num_done), prints=world.rank == 0)


class _Target:
    """Where lines go: a file, standard output, or nowhere on ranks other than the first.

    Args:
        path: the file; None: there is none.
        origin: see `PredictionFile`.
        replace: see `PredictionFile`.
    """

    def __init__(self, path: Path | None, origin: dict[str, Any], *, replace: bool) -> None:
        self._file = None if path is None else PredictionFile(path, origin, replace=replace)
        self.num_lines = self._file.num_lines if self._file else 0

    def write_all(self, rows: Iterator[dict[str, Any]], *, prints: bool) -> None:
        """Write lines as they come."""
        for row in rows:
            if self._file:
                self._file.write(row)
            elif prints:
                sys.stdout.write(encode_line(row))

    def close(self) -> None:
        """Make all lines durable."""
        if self._file:
            self._file.close()


def _describe_origin(
    found: FoundModel, batches: RecordBatches, weights: inputs.Weights, dtype: inputs.Dtype | None
) -> dict[str, Any]:
    """Return what the lines of a file depend on."""
    from ..engine.assemble.frozen import fingerprint_folder, fingerprint_manifest

    manifest = found.manifest
    return {
        "checkpoint": fingerprint_manifest(manifest)
        if manifest
        else fingerprint_folder(found.path),
        "data": batches.fingerprint(),
        "weights": weights.value,
        "dtype": dtype.value if dtype else found.recipe.precision.compute,
        "batch_size": batches.size,
        "seq_len": batches.seq_len,
        "on_long": batches.on_long,
        "echo": list(batches.echo),
    }
