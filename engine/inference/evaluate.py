"""The numbers of a trained model on its validation split, or on other data, for any task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..core.errors import DataError, RecipeError
from ..corpus.checksums import ALONE
from ..data.batch import Batch
from ..data.loader import iterate_validation
from ..sources.configs import SourceConfig
from ..tasks.metrics.metric_set import MetricSet
from ..tasks.tables import TaskData
from ..train.evaluate import evaluate as run_evaluation
from .infer import InferOptions, open_records
from .inputs import find_texts
from .measure import measure_source, measure_validation
from .open import OpenedModel


def evaluate(
    opened: OpenedModel,
    data: str | Path | None = None,
    *,
    seq_len: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    limit: int = 0,
) -> dict[str, Any]:
    """Return the numbers of a model, as `trainer evaluate --json` prints them.

    Those of a language model are loss, perplexity and bits per byte; those of other tasks are the
    loss and the recipe's metrics.

    Args:
        opened: the result of `open_model`.
        data: a file, folder or glob of text, .jsonl or .parquet; None is the validation split.
        seq_len: tokens a row of `data`; None takes that of training.
        stride: tokens scored by each row of a long document; None is all of them.
        batch_size: rows computed together.
        limit: the number of documents or rows to score; 0 is all.

    Raises:
        RecipeError: there is no validation split, or the stride is longer than a row.
        DataError: the data cannot be read.
    """
    if not opened.recipe.task.scores_texts:
        if data is None:
            return measure_task(opened, batch_size=batch_size, limit=limit)
        source = find_texts(str(data))
        return measure_records(
            opened, source, name=str(data), seq_len=seq_len, batch_size=batch_size, limit=limit
        )
    if data is None:
        return measure_validation(opened, batch_size=batch_size, limit=limit).summary()
    return measure_source(
        opened,
        find_texts(str(data)),
        name=str(data),
        seq_len=seq_len,
        stride=stride,
        batch_size=batch_size,
        limit=limit,
    ).summary()


def measure_task(opened: OpenedModel, *, batch_size: int = 8, limit: int = 0) -> dict[str, Any]:
    """Measure a task on the validation split of its recipe, as the evaluations of the run do.

    Args:
        opened: the model of a checkpoint.
        batch_size: samples computed together on a rank.
        limit: the number of samples to measure; 0 is all.

    Returns:
        `name`, `samples`, and the numbers of the task and of the metrics.

    Raises:
        RecipeError: the model is of a Hugging Face folder.
        DataError: the recipe holds nothing out.
    """
    recipe, hint = opened.recipe, "name records with --data or --source"
    if opened.step is None:
        folder = f"{opened.path} is a Hugging Face folder, without a recipe that holds records out"
        raise RecipeError(folder, hint)
    rank, ranks = _rank(), _ranks()
    settings = opened.data, opened.tokenizer, recipe.run.seed, ""
    data = TaskData(*settings, ALONE, loss=recipe.loss)
    split = recipe.task.build_data(data).validation
    if split is None:
        raise DataError("the recipe holds nothing out for validation", hint)
    count = min(limit or split.rows_per_epoch, split.rows_per_epoch)
    sizes = {"micro_batch": batch_size, "global_batch": max(count, ranks)}
    table = opened.data.model_copy(update=sizes)
    read = partial(iterate_validation, split, table, 1, rank, ranks)
    numbers = _measure(opened, read, split.separate_labels)
    return {"name": "validation split", "samples": count, **numbers}


def measure_records(
    opened: OpenedModel,
    source: SourceConfig,
    *,
    name: str,
    seq_len: int | None = None,
    batch_size: int = 8,
    limit: int = 0,
) -> dict[str, Any]:
    """Measure a task on the labelled records of a source; see `measure_task`.

    Raises:
        RecipeError: the source has no records of the task.
        DataError: a record cannot be read or is too long, or there is none.
    """
    recipe, options = opened.recipe, InferOptions(batch_size, seq_len)
    batches = open_records(
        (recipe.task, recipe.loss),
        recipe.data,
        opened.tokenizer,
        [source],
        options,
        is_labelled=True,
    )
    numbers = _measure(opened, partial(batches.labelled, limit))
    return {"name": name, "samples": batches.num_records, **numbers}


def _measure(
    opened: OpenedModel, read: Callable[[], Iterable[Batch]], sources: Sequence[str] = ()
) -> dict[str, float]:
    parts, task = opened.build_task()
    recipe, plan, metrics = opened.recipe, parts.plan, None
    outputs = recipe.task.outputs(recipe.loss)
    if outputs is not None and recipe.evaluate.metrics:
        if not outputs.has_scores:
            outputs = replace(outputs, num_classes=parts.built.config.vocab)
        metrics = MetricSet(recipe.evaluate.metrics, outputs, plan.device)
    model = parts.parallel_model.model
    numbers = run_evaluation(
        parts.parallel_model,
        lambda: (plan.take(batch, model) for batch in read()),
        task.with_sources(sources),
        plan.device,
        plan.degrees,
        metrics,
    )
    model.eval()
    return numbers


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
