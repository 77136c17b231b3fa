"""Opens what evaluations measure: the validation split, and `[[evaluate.splits]]`."""

from __future__ import annotations

from collections.abc import Callable
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
    validation: NumberedSamples | None,
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
        validation: what is held out; None: nothing.
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

    def split(name: str, samples: NumberedSamples, rows: Data, steps: int) -> ValidationSplit:
        batches = iterate_validation(samples, rows, steps, plan.data_rank, plan.degrees.data)
        own = task.with_sources(samples.separate_labels)
        return ValidationSplit(name, [take(batch) for batch in batches], own, metrics)

    splits = []
    if validation is not None:
        splits.append(split(VALIDATION, validation, recipe.data, table.steps))
    for config in table.splits:
        rows = table_of_split(config, recipe.data)
        opened = recipe.task.build_data(replace(data, table=rows))
        samples = opened.train.each_once()
        if outputs:
            named = NamedSamples(config.name, samples, rows, opened.fingerprint)
            samples = outputs.attach(named, task.batch_class)
        steps = table.steps if config.steps is None else config.steps
        splits.append(split(config.name, samples, rows, steps))
    return splits


def table_of_split(split: EvaluationSplit, data: Data) -> Data:
    """Return the `[data]` table of a further split, whose sources are read whole."""
    given = {"seq_len": split.seq_len, "micro_batch": split.micro_batch}
    sources = [source.model_copy(update={"split": "train"}) for source in split.sources]
    return data.model_copy(
        update={
            "sources": sources,
            "validation_fraction": 0.0,
            "shuffle": False,
            **{key: value for key, value in given.items() if value is not None},
        }
    )
