"""Whether `[evaluate]` asks for numbers that the task of a recipe has."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.errors import nearest
from ...core.text.display import format_value
from ...core.text.positions import KeyPath
from ...core.text.tree import Finding
from ...observe.metrics import TASKS, VALIDATION
from ..schema import Recipe
from .task_checks import reason_for_no_text

RESERVED = ("kind", "step", "split", "time", "samples", "tokens")
"""keys that every row has"""


def check_metrics(recipe: Recipe) -> Iterator[Finding]:
    """Yield what is wrong with the metrics of a validation and with the one that is followed."""
    yield from _measures(recipe)
    yield from _splits(recipe)
    yield from _tasks(recipe) if recipe.evaluate.harness.tasks else ()
    yield from _schedule(recipe) if recipe.schedule.follows_score else ()
    table, scores = recipe.evaluate, recipe.task.scores
    known = {**scores, **dict(_numbers(recipe))}
    if table.follows_task:  # which scores a task has only the harness knows
        known[table.score_key] = None
    if table.number_key not in known:
        message = f"no number of an evaluation is named {format_value(table.metric)}"
        hint = nearest(table.number_key, known) or f"known: {', '.join(known)}"
        yield ("evaluate", "metric"), message, hint
    elif known[table.number_key] is None and table.direction is None:
        message = f"is missing: whether a higher {table.number_key} is better"
        yield ("evaluate", "direction"), message, 'give "min" or "max"'


def _schedule(recipe: Recipe) -> Iterator[Finding]:
    path: KeyPath = ("evaluate", "interval")
    table, is_measured = recipe.evaluate, recipe.evaluate.is_enabled
    if table.follows_task and table.harness.interval is not None:
        is_measured, path = table.harness.interval > 0, ("evaluate", "harness", "interval")
    if not is_measured:
        message = f'the schedule "{recipe.schedule.name}" follows evaluate.metric, which is not '
        message += "measured during training with interval = 0"
        yield path, message, "give the steps between two evaluations"


def _tasks(recipe: Recipe) -> Iterator[Finding]:
    path = ("evaluate", "harness", "tasks")
    if reason := reason_for_no_text(recipe.model, recipe.task.needs_language_model):
        yield path, f"tasks are for models that predict texts: {reason}", "leave the tasks out"
    if recipe.parallel.pipeline != 1:
        message = "stages of a pipeline take batches of one size, and the texts of tasks have many"
        yield path, message, "measure checkpoints with `trainer evaluate --tasks`"


def _splits(recipe: Recipe) -> Iterator[Finding]:
    names = [VALIDATION, TASKS, "train"]
    for index, split in enumerate(recipe.evaluate.splits):
        path = ("evaluate", "splits", index)
        if split.name in names:
            yield (*path, "name"), f'a split is named "{split.name}" already', "take another name"
        names.append(split.name)
        other = split.seq_len not in (None, recipe.data.seq_len)
        if other and (recipe.parallel.pipeline != 1 or recipe.parallel.context != 1):
            message = "pipeline and context ranks take rows of data.seq_len alone"
            yield (*path, "seq_len"), message, "leave it out"
        for number, source in enumerate(split.sources):
            if getattr(source, "streaming", False):
                where = (*path, "sources", number, "streaming")
                yield where, "the samples of an evaluation are read whole", "leave streaming out"


def _numbers(recipe: Recipe) -> Iterator[tuple[str, bool | None]]:
    """Yield what evaluate.metric can name, KEY, or KEY/NUMBER of means, and if more is better."""
    outputs = recipe.task.outputs(recipe.loss)
    for config in recipe.evaluate.metrics:
        yield config.row_key, config.higher_is_better
        if config.is_sample_mean and outputs is not None:
            for name in config.numbers(outputs):
                yield f"{config.row_key}/{name}", config.higher_is_better


def _measures(recipe: Recipe) -> Iterator[Finding]:
    outputs, taken = recipe.task.outputs(recipe.loss), {*RESERVED, *recipe.task.scores}
    for index, config in enumerate(recipe.evaluate.metrics):
        path = ("evaluate", "metrics", index)
        if outputs is None:
            message = f'the task "{recipe.task.name}" has no outputs that metrics can measure'
            yield (*path, "name"), message, "remove the metric"
            continue
        if config.name in recipe.task.scores:
            message = f'each evaluation of the task "{recipe.task.name}" has {config.name} already'
            yield (*path, "name"), message, "remove the entry"
            continue
        for key, message, hint in config.mismatches(outputs):
            yield (*path, key), message, hint
        if config.row_key in taken:
            message = f"another number of an evaluation is named {format_value(config.row_key)}"
            yield (*path, "key"), message, "give the metric another key"
        elif config.row_key == recipe.evaluate.number_key and not config.is_scalar(outputs):
            message = f"{config.row_key} is several numbers, and evaluate.metric must be one"
            hint = "give the metric another average, or a key of its own"
            if config.is_sample_mean:
                hint = f'name one, such as "{config.row_key}/{config.numbers(outputs)[-1]}"'
            yield (*path, "name"), message, hint
        taken.add(config.row_key)
