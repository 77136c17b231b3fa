"""Opens what evaluations measure: the validation split, and `[[evaluate.splits]]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..data.batch import Batch
from ..data.loader import iterate_validation
from ..data.samples import NumberedSamples
from ..data.tables import Data
from ..observe.metrics import VALIDATION
from ..parallel.plan import Plan
from ..recipe.schema import Recipe
from ..tasks.metrics.metric_set import MetricSet
from ..tasks.tables import TaskData
from ..tasks.task import Task
from ..train.parts import ValidationSplit
from ..train.tables import EvaluationSplit
from .precomputed import FrozenOutputs, NamedSamples


def open_splits(
    recipe: Recipe,
    validation: Sequence[tuple[str, NumberedSamples, Data]],
    data: TaskData,
    plan: Plan,
    task: Task[Any],
    metrics: MetricSet | None,
    take: Callable[[Batch], Batch],
    outputs: FrozenOutputs | None = None,
) -> list[ValidationSplit]:
    """Return all that evaluations measure on this rank; the validation split comes first.

    Args:
        recipe: the validated recipe.
        validation: what each training split holds out; see `Turns.validation`.
        data: what tasks open data with, for no run.
        plan: how ranks share the model.
        task: the task of the step, as validations call it.
        metrics: further measures, which all splits share: they are measured one by one.
        take: selects what this rank computes of a batch.
        outputs: those of a frozen model on disk; `validation` has them already.

    Raises:
        DataError: a source cannot be read.
    """
    table = recipe.evaluate
    if not table.is_enabled:
        return []
    held_out = [NamedSamples(VALIDATION, samples, rows, {}) for _, samples, rows in validation]
    found = {VALIDATION: held_out} if held_out else {}
    for named in open_further_splits(recipe, data):
        samples = outputs.attach(named, task.batch_class) if outputs else named.samples
        found[named.name] = [named._replace(samples=samples)]
    steps = {config.name: config.steps for config in table.splits if config.steps is not None}
    splits = []
    for name, parts in found.items():
        most = steps.get(name, table.steps)
        batches = [
            take(batch)
            for _, samples, rows, _ in parts
            for batch in iterate_validation(samples, rows, most, plan.data_rank, plan.degrees.data)
        ]
        own = task.with_sources(parts[0].samples.separate_labels)
        splits.append(ValidationSplit(name, batches, own, metrics))
    return splits


def open_further_splits(
    recipe: Recipe, data: TaskData, names: Sequence[str] = ()
) -> Iterator[NamedSamples]:
    """Yield `[[evaluate.splits]]`, whose samples come once each.

    Args:
        recipe: the validated recipe.
        data: what tasks open data with, for no run.
        names: those that are opened; empty: all.

    Raises:
        DataError: a source cannot be read.
    """
    for config in recipe.evaluate.splits:
        if not names or config.name in names:
            rows = _table_of(config, recipe.data)
            opened = recipe.task.build_data(replace(data, table=rows))
            yield NamedSamples(config.name, opened.train.each_once(), rows, opened.fingerprint)


def _table_of(split: EvaluationSplit, data: Data) -> Data:
    """Return the `[data]` table of a further split, whose sources are read whole."""
    given = {"seq_len": split.seq_len, "micro_batch": split.micro_batch}
    sources = [source.model_copy(update={"split": "train"}) for source in split.sources]
    return data.model_copy(
        update={
            "sources": sources,
            "splits": [],
            "validation_fraction": 0.0,
            "shuffle": False,
            **{key: value for key, value in given.items() if value is not None},
        }
    )
