"""`trainer evaluate`: loss, metrics and tasks of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..engine.assemble.found_model import find_model
from ..engine.checkpoint.find import candidates
from ..engine.core.errors import CheckpointError, EnvironmentFault, RecipeError
from ..engine.inference.inputs import Dtype, Weights, find_data
from ..engine.observe.metrics import replace_non_finite
from .options import AsJson
from .ranks import NumProcesses, run_on_ranks
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.inference.open import OpenedModel
    from ..engine.sources.configs import SourceConfig


def evaluate(
    context: typer.Context,
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
    every_checkpoint: Annotated[
        bool, typer.Option("--every-checkpoint", help="each checkpoint of a run, a row each")
    ] = False,
    nproc: NumProcesses = 1,
    as_json: AsJson = False,
) -> None:
    """Measure a model on the validation split or on other data, and run tasks."""
    request = _Request(find_data(data or [], source, settings or []), batch, limit, seq_len, stride)
    if not tasks and (include_path is not None or num_fewshot is not None):
        raise RecipeError("--include-path and --num-fewshot are for --tasks", "name tasks")
    if not request.sources and not tasks and (seq_len is not None or stride is not None):
        raise RecipeError(
            "--seq-len and --stride do not change the rows of the validation split",
            "name texts with --data or --source",
        )
    if tasks and (every_checkpoint or nproc > 1):
        raise RecipeError("--tasks runs in one process, on one checkpoint", "leave the other out")
    run_on_ranks(context, nproc)
    paths = _list_checkpoints(checkpoint) if every_checkpoint else [checkpoint]
    # Errors come before torch is imported.
    found = [find_model(path, plugin or []) for path in paths]
    from ..engine.inference.open import TIMEOUT_SECONDS, open_found
    from ..engine.launch.environment import find_world
    from ..engine.launch.group import pick_device, process_group

    world, reports = find_world(), list[dict[str, Any]]()
    with process_group(world, pick_device(world), TIMEOUT_SECONDS):
        for each in found:
            opened = open_found(each, weights=weights, dtype=dtype, world=world, is_sharded=True)
            measured = [] if tasks and not request.sources else _measure(opened, request)
            reports.append({**_about(opened, weights), "texts": measured, "tasks": {}})
        if tasks:
            reports[0]["tasks"] = _harness()(
                opened,
                [name.strip() for name in tasks.split(",") if name.strip()],
                include_path=include_path,
                num_fewshot=num_fewshot,
                seq_len=seq_len or opened.recipe.data.seq_len,
                batch_size=batch,
                limit=limit,
            )
    if world.rank == 0:
        _print_reports(reports, as_json=as_json, is_list=every_checkpoint)


class _Request(NamedTuple):
    """What is measured of each model."""

    sources: list[tuple[str, SourceConfig]]
    batch_size: int
    limit: int
    seq_len: int | None
    stride: int | None


def _list_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first.

    Raises:
        CheckpointError: there are none.
    """
    if not (found := candidates(path)):
        raise CheckpointError(f"no checkpoint in {path}")
    return found[::-1]


def _measure(opened: OpenedModel, request: _Request) -> list[dict[str, Any]]:
    """Return the numbers of a model on the data, or on the validation split."""
    from ..engine.inference.evaluate import measure_records, measure_task
    from ..engine.inference.measure import measure_source, measure_validation

    sources, batch_size, limit, seq_len, stride = request
    if not opened.recipe.task.scores_texts:
        if stride is not None:
            raise RecipeError(
                f'--stride has no meaning for the task "{opened.recipe.task.name}"', "leave it out"
            )
        if not sources:
            return [measure_task(opened, batch_size=batch_size, limit=limit)]
        sizes: Any = {"seq_len": seq_len, "batch_size": batch_size, "limit": limit}
        return [measure_records(opened, each, name=name, **sizes) for name, each in sources]
    if not sources:
        whole = measure_validation(opened, batch_size=batch_size, limit=limit)
        return [each.summary() for each in (whole, *whole.sources)]
    return [
        measure_source(
            opened,
            each,
            name=name,
            seq_len=seq_len,
            stride=stride,
            batch_size=batch_size,
            limit=limit,
        ).summary()
        for name, each in sources
    ]


def _print_reports(reports: Sequence[Mapping[str, Any]], *, as_json: bool, is_list: bool) -> None:
    if as_json:
        shown = {"checkpoints": reports} if is_list else reports[0]
        typer.echo(json.dumps(replace_non_finite(shown), indent=2, default=str, allow_nan=False))
    elif is_list:
        _print_checkpoints(reports)
    else:
        for each in reports[0]["texts"]:
            _print_measured(each)
        _print_tasks(reports[0]["tasks"])


def _print_checkpoints(reports: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each checkpoint and text."""
    found = [(report["step"], each) for report in reports for each in report["texts"]]
    rows = [(step, each["name"], _flatten(each)) for step, each in found]
    keys = list(dict.fromkeys(key for _, _, numbers in rows for key in numbers))
    table = [["STEP", "DATA", *(key.upper() for key in keys)]]
    for step, name, numbers in rows:
        table.append([str(step), name, *(_show(numbers.get(key)) for key in keys)])
    print_table(table)


def _flatten(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one measurement in a row: of texts those that models share."""
    if "token" in measured:
        token, byte = measured["token"], measured["byte"]
        shared = {"loss": token["loss"], "perplexity": token["perplexity"]}
        return {**shared, "bits per byte": byte["bits"]}
    return {key: value for key, value in measured.items() if key not in ("name", "samples")}


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


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
    if "token" not in measured:
        echo(f"{measured['name']}: {measured['samples']:,} samples")
        print_table([["MEASURE", "VALUE"], *([k, _show(v)] for k, v in _flatten(measured).items())])
        return
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
