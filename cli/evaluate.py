"""`trainer evaluate`: loss, perplexity and tasks of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.core.errors import EnvironmentFault, RecipeError
from ..engine.inference.inputs import Dtype, Weights, find_model, find_source, find_texts
from ..engine.observe.metrics import replace_non_finite
from .options import AsJson
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.inference.open import OpenedModel


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="a checkpoint, a run directory (its newest), or a Hugging Face folder",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="a file, folder or glob of text, .jsonl or .parquet; again for more"),
    ] = None,
    source: Annotated[str, typer.Option(help="a source by its name in recipes")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of the source")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="tasks of lm-evaluation-harness, by commas (extra [eval])")
    ] = "",
    include_path: Annotated[Path | None, typer.Option(help="a folder with more tasks")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, max=2**16, help="examples before each question of a task")
    ] = None,
    limit: Annotated[
        int,
        typer.Option(min=0, max=2**53, help="only so many documents, rows or examples of a task"),
    ] = 0,
    seq_len: Annotated[
        int | None, typer.Option(min=1, max=2**24, help="tokens a row; default: as in training")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**24, help="tokens scored by each row of a long document; default: all"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="rows computed together")] = 8,
    weights: Annotated[
        Weights, typer.Option(help='"ema": the averaged weights that [ema] keeps')
    ] = Weights.MODEL,
    dtype: Annotated[
        Dtype | None, typer.Option(help="what to compute in; default: as in training")
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option(help="Python module that registers the model or tokenizer")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure loss and perplexity, on the validation split or on other texts, and run tasks."""

    texts = [(path, find_texts(path)) for path in data or []]
    if source:
        texts.append((source, find_source(source, settings or [])))
    elif settings:
        raise RecipeError("--set without --source", "name the source whose key it is")
    if not tasks and (include_path is not None or num_fewshot is not None):
        raise RecipeError("--include-path and --num-fewshot are for --tasks", "name tasks")
    if not texts and not tasks and (seq_len is not None or stride is not None):
        raise RecipeError(
            "--seq-len and --stride do not change the rows of the validation split",
            "name texts with --data or --source",
        )
    found = find_model(checkpoint, plugin or [])  # errors come before torch is imported
    from ..engine.inference.measure import measure_source, measure_validation
    from ..engine.inference.open import open_found

    opened = open_found(found, weights=weights, dtype=dtype)
    measured = [
        measure_source(
            opened,
            text,
            name=name,
            seq_len=seq_len,
            stride=stride,
            batch_size=batch,
            limit=limit,
        ).summary()
        for name, text in texts
    ]
    if not texts and not tasks:
        whole = measure_validation(opened, batch_size=batch, limit=limit)
        measured = [measured.summary() for measured in (whole, *whole.sources)]
    results: dict[str, Any] = {}
    if tasks:
        run_tasks = _harness()
        results = run_tasks(
            opened,
            [name.strip() for name in tasks.split(",") if name.strip()],
            include_path=include_path,
            num_fewshot=num_fewshot,
            seq_len=seq_len or opened.recipe.data.seq_len,
            batch_size=batch,
            limit=limit,
        )
    if as_json:
        report = {**_about(opened, weights), "texts": measured, "tasks": results}
        typer.echo(json.dumps(replace_non_finite(report), indent=2, default=str, allow_nan=False))
        return
    for each in measured:
        _print_measured(each)
    _print_tasks(results)


def _harness() -> Any:
    """Return what runs tasks.

    Raises:
        EnvironmentFault: the harness is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise EnvironmentFault(
            "--tasks needs lm-evaluation-harness", 'pip install "trainer[eval]"'
        ) from error
    from ..engine.inference.harness import run_tasks

    return run_tasks


def _about(opened: OpenedModel, weights: Weights) -> dict[str, Any]:
    from ..engine.precision.hardware import dtype_name

    return {
        "checkpoint": str(opened.path),
        "step": opened.step,
        "weights": weights.value,
        "dtype": dtype_name(opened.model.compute_dtype),
    }


def _print_measured(measured: dict[str, Any]) -> None:
    skipped = f", {measured['skipped']:,} skipped" if measured["skipped"] else ""
    echo(f"{measured['name']}: {measured['texts']:,} texts{skipped}")
    rows = [["PER", "COUNT", "LOSS", "BITS", "PERPLEXITY"]]
    for unit in ("token", "byte", "word"):
        found = measured[unit]
        numbers = [f"{found[key]:.5g}" for key in ("loss", "bits", "perplexity")]
        rows.append([unit, f"{found['count']:,}", *numbers])
    print_table(rows)


def _print_tasks(results: dict[str, Any]) -> None:
    rows = [["TASK", "METRIC", "VALUE", "STDERR"]]
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, rule = name.partition(",")
            if not rule or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{rule}")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            label = metric if rule == "none" else f"{metric} ({rule})"
            rows.append(
                [task, label, f"{value:.4f}" if isinstance(value, float) else str(value), shown]
            )
    if len(rows) > 1:
        print_table(rows)
