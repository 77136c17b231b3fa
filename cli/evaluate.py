"""`trainer evaluate`: loss, metrics and tasks of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..engine.assemble.found_model import FoundModel, find_model
from ..engine.checkpoint.find import candidates
from ..engine.core.errors import CheckpointError, RecipeError
from ..engine.inference import inputs
from ..engine.inference.find_harness import import_harness, name_scores
from ..engine.observe.metrics import replace_non_finite
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
from .options import AsJson, Plugins
from .ranks import NumProcesses, run_on_ranks
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.inference.open import OpenedModel
    from ..engine.sources.configs import SourceConfig


def evaluate(
    context: typer.Context,
    checkpoint: TrainedModel,
    data: DataPaths = None,
    source: SourceName = "",
    settings: SourceSettings = None,
    split: Annotated[
        str, typer.Option(help="a split of the recipe; default: validation and all others")
    ] = "",
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
    seq_len: SeqLen = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**24, help="tokens scored by each row of a long document; default: all"
        ),
    ] = None,
    batch_size: BatchSize = 8,
    weights: Weights = inputs.Weights.MODEL,
    dtype: Dtype = None,
    plugin: Plugins = None,
    every_checkpoint: Annotated[
        bool, typer.Option("--every-checkpoint", help="each checkpoint of a run, a row each")
    ] = False,
    nproc: NumProcesses = 1,
    as_json: AsJson = False,
) -> None:
    """Measure a model on the splits of the recipe or on other data, and run tasks."""
    sources = inputs.find_data(data or [], source, settings or [])
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    request = _Request(
        sources, split, batch_size, limit, seq_len, stride, names, include_path, num_fewshot
    )
    request.check(asks_tasks=bool(tasks))
    run_on_ranks(context, nproc)
    paths = candidates(checkpoint)[::-1] if every_checkpoint else [checkpoint]  # oldest first
    if not paths:
        raise CheckpointError(f"no checkpoint in {checkpoint}")
    # Errors come before torch is imported.
    found = [find_model(path, plugin or []) for path in paths]
    from ..engine.inference.open import join_ranks, open_found

    reports = list[dict[str, Any]]()
    with join_ranks() as world:
        loaded = _load_tasks(request, found)
        for each in found:
            opened = open_found(each, weights=weights, dtype=dtype, world=world, is_sharded=True)
            only_tasks = names and not sources and not split
            measured = [] if only_tasks else _measure(opened, request)
            scores = _run_tasks(opened, loaded, request)
            reports.append({**_about(opened, weights), "texts": measured, "tasks": scores})
    if world.rank == 0:
        _print_reports(reports, as_json=as_json, is_list=every_checkpoint)


class _Request(NamedTuple):
    """What is measured of each model."""

    sources: list[tuple[str, SourceConfig]]
    split: str
    batch_size: int
    limit: int
    seq_len: int | None
    stride: int | None
    tasks: list[str]
    include_path: Path | None
    num_fewshot: int | None

    def check(self, *, asks_tasks: bool) -> None:
        """Refuse options that do not go together."""
        if asks_tasks and not self.tasks:
            raise RecipeError("--tasks names no task")
        if not self.tasks and (self.include_path is not None or self.num_fewshot is not None):
            raise RecipeError("--include-path and --num-fewshot are for --tasks", "name tasks")
        if self.sources and self.split:
            raise RecipeError("--split names what the recipe holds out", "leave out --data")
        has_length = self.seq_len is not None or self.stride is not None
        if not self.sources and not self.tasks and has_length:
            raise RecipeError(
                "--seq-len and --stride do not change the rows of the validation split",
                "name texts with --data or --source",
            )


def _load_tasks(request: _Request, models: Sequence[FoundModel]) -> dict[str, Any]:
    """Load tasks with their data; empty: none are named.

    Raises:
        RecipeError: a task does not exist, or a model predicts no texts.
        EnvironmentFault: the harness is not installed, or data of a task cannot be read.
    """
    if not request.tasks:
        return {}
    for each in models:
        inputs.require_generation(each.recipe.model, each.recipe.task)
    load, folder = import_harness().load_tasks, request.include_path
    return load(request.tasks, folder, request.num_fewshot)  # type: ignore[no-any-return] # a module


def _run_tasks(opened: OpenedModel, loaded: dict[str, Any], request: _Request) -> dict[str, Any]:
    """Return the harness's results by task; empty: there are no tasks."""
    if not loaded:
        return {}
    harness, seq_len = import_harness(), request.seq_len or opened.recipe.data.seq_len
    model = harness.HarnessModel(opened.scorer, opened.tokenizer, seq_len, request.batch_size)
    return harness.run_tasks(model, loaded, request.limit)  # type: ignore[no-any-return] # a module


def _measure(opened: OpenedModel, request: _Request) -> list[dict[str, Any]]:
    """Return the numbers of a model on the data, or on the splits of the recipe."""
    from ..engine.inference.evaluate import measure_records, summarize_split
    from ..engine.inference.measure import measure_source, open_splits

    sources, seq_len, stride = request.sources, request.seq_len, request.stride
    sizes: Any = {"batch_size": request.batch_size, "limit": request.limit}
    scores_texts = opened.recipe.task.scores_texts
    if stride is not None and not scores_texts:
        raise RecipeError(
            f'--stride has no meaning for the task "{opened.recipe.task.name}"', "leave it out"
        )
    if not sources:
        splits = open_splits(opened, request.split)
        return [row for each in splits for row in summarize_split(opened, each, **sizes)]
    sizes["seq_len"] = seq_len
    if not scores_texts:
        return [measure_records(opened, each, name=name, **sizes) for name, each in sources]
    return [
        measure_source(opened, each, name=name, stride=stride, **sizes).summary()
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
    found = [
        (report["step"], each)
        for report in reports
        for each in (*report["texts"], {"name": "tasks", **name_scores(report["tasks"])})
        if len(each) > 1  # there are tasks
    ]
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


def _about(opened: OpenedModel, weights: inputs.Weights) -> dict[str, Any]:
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
