"""Opens what a run trains on: one split, or several that are trained in turn."""

from __future__ import annotations

import os
from dataclasses import replace

from ..core.errors import Problem, RecipeError
from ..data.dataset import OpenedData, Turn, Turns
from ..tasks.tables import TaskConfig, TaskData


def open_training(task: TaskConfig, data: TaskData, *, has_dropout: bool = False) -> Turns:
    """Open the sources of a recipe, or of each of its training splits.

    Args:
        task: the recipe's task.
        data: what the task opens data with; a split has a seed of its own.
        has_dropout: whether adapters drop a share of their input, so that batches need keys.

    Raises:
        RecipeError: the samples of a split without `steps` do not fill one batch.
        DataError: a source cannot be read, is damaged, or is too short for one row.
    """
    table, tables = data.table, data.table.tables
    if not table.splits:
        opened = _open(task, data, has_dropout)
        return Turns([Turn("", 1, table, opened)], opened.train.rows_per_epoch)
    longest = max(own.seq_len for own in tables)
    # Losses of sources are told apart by label, over all splits.
    labels = list(dict.fromkeys(label for own in tables for label in own.labels))
    turns = []
    for number, (split, own) in enumerate(zip(table.splits, tables, strict=True)):
        # The producers of two splits that read the same stream need a folder each.
        run = data.run and os.path.join(data.run, split.name)
        seed = data.seed + number
        own_data = replace(data, table=own, seed=seed, run=run, longest=longest)
        opened = _open(task, own_data, has_dropout)
        rows = opened.train.rows_per_epoch
        steps = split.steps or rows // own.global_batch
        if not steps:
            message = f"{rows} rows do not fill one batch of {own.global_batch}"
            hint = "give it steps, or a smaller global_batch"
            raise RecipeError([Problem(message, f"data.splits.{number}", hint=hint)])
        sizes = f"{own.global_batch:,} samples of {own.seq_len:,} tokens"
        note = f"split {split.name}: turns of {steps:,} steps of {sizes}"
        opened = replace(
            opened,
            train=opened.train.among(labels),
            validation=opened.validation and opened.validation.among(labels),
            notes=[note, *opened.notes],
        )
        turns.append(Turn(split.name, steps, own, opened))
    epoch_samples = sum(turn.steps * turn.table.global_batch for turn in turns)
    return Turns(turns, epoch_samples)


def _open(task: TaskConfig, data: TaskData, has_dropout: bool) -> OpenedData:
    opened = task.build_data(data)
    if has_dropout:
        opened = replace(opened, train=opened.train.with_dropout(data.seed))
    return opened
