"""The numbers of a trained model on its validation split, or on other data, for any task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..assemble.precomputed import NamedSamples
from ..data.batch import Batch
from ..data.loader import iterate_validation
from ..observe.metrics import VALIDATION
from ..sources.configs import SourceConfig
from ..tasks.metrics.metric_set import MetricSet
from ..train.evaluate import evaluate as run_evaluation
from .infer import InferOptions, open_records
from .inputs import find_texts
from .measure import measure_source, measure_split, open_splits
from .open import OpenedModel


def evaluate(
    opened: OpenedModel,
    data: str | Path | None = None,
    *,
    split: str = VALIDATION,
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
        data: a file, folder or glob of text, .jsonl or .parquet; None is a split of the recipe.
        split: the name of the split.
        seq_len: tokens a row of `data`; None takes that of training.
        stride: tokens scored by each row of a long document; None is all of them.
        batch_size: rows computed together.
        limit: the number of documents or rows to score; 0 is all.

    Raises:
        RecipeError: there is no such split, or the stride is longer than a row.
        DataError: the data cannot be read.
    """
    if data is None:
        (found,) = open_splits(opened, split)
        return summarize_split(opened, found, batch_size=batch_size, limit=limit)[0]
    if not opened.recipe.task.scores_texts:
        source = find_texts(str(data))
        return measure_records(
            opened, source, name=str(data), seq_len=seq_len, batch_size=batch_size, limit=limit
        )
    return measure_source(
        opened,
        find_texts(str(data)),
        name=str(data),
        seq_len=seq_len,
        stride=stride,
        batch_size=batch_size,
        limit=limit,
    ).summary()


def summarize_split(
    opened: OpenedModel, split: NamedSamples, *, batch_size: int = 8, limit: int = 0
) -> list[dict[str, Any]]:
    """Measure a split of the recipe as the evaluations of the run do; see `measure_split`.

    A split with a smaller micro batch than training's is computed with that at most.

    Returns:
        for a language model what `Measured.summary` returns of the split, and of each of several
        sources; for another task `name`, `samples`, and the numbers of the task and its metrics.
    """
    if split.table.micro_batch < opened.data.micro_batch:  # its rows are too long for more
        batch_size = min(batch_size, split.table.micro_batch)
    if opened.recipe.task.scores_texts:
        whole = measure_split(opened, split, batch_size=batch_size, limit=limit)
        return [each.summary() for each in (whole, *whole.sources)]
    assert opened.parts is not None, "stages share the model"
    samples, plan = split.samples, opened.parts.plan
    count = min(limit or samples.rows_per_epoch, samples.rows_per_epoch)
    sizes = {"micro_batch": batch_size, "global_batch": max(count, plan.degrees.data)}
    table = split.table.model_copy(update=sizes)
    read = partial(iterate_validation, samples, table, 1, plan.data_rank, plan.degrees.data)
    numbers = _measure(opened, read, samples.separate_labels)
    return [{"name": f"{split.name} split", "samples": count, **numbers}]


def measure_records(
    opened: OpenedModel,
    source: SourceConfig,
    *,
    name: str,
    seq_len: int | None = None,
    batch_size: int = 8,
    limit: int = 0,
) -> dict[str, Any]:
    """Measure a task on the labelled records of a source; see `summarize_split`.

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
