"""The training loop: what happens, in order."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from ..core import faults
from ..core.heartbeat import heartbeat
from ..data.batch import Batch
from ..launch.signals import StopFlag, StopRequested
from ..observe.metrics import TASKS, prefix_of
from ..observe.observer import Observer
from .evaluate import Tasks, measure_tasks, validate
from .health import Health
from .parts import Parts, Position, ValidationSplit

if TYPE_CHECKING:
    from ..checkpoint.tables import Checkpoint
    from .saving import Saver
    from .tables import Evaluate


Outcome = Literal["finished", "stopped early", "stopped"]


def train(
    parts: Parts,
    position: Position,
    saver: Saver,
    health: Health,
    observer: Observer,
    stop: StopFlag,
    tasks: Tasks,
) -> Outcome:
    """Train from `position` to the last step, or until evaluations or a signal say to stop.

    Until the first step is done, and while a rollback reads a checkpoint, a signal ends the process
    at once; later it waits for the end of the step, and gives up an evaluation or a wait for data.

    Args:
        parts: what is trained, and with what; all of it is changed in place.
        position: how far the run is; kept up to date.
        saver: writes and restores checkpoints.
        health: examines the loss and the gradient of each step.
        observer: records and shows numbers.
        stop: knows whether a signal asked this process or another rank to stop.
        tasks: measures the tasks of lm-evaluation-harness that the recipe names.

    Returns:
        how training ended.

    Raises:
        Diverged: training diverged, and the policies of `[resilience]` say to stop.
        CheckpointError: a checkpoint could not be written.
        Stopped: a signal came while nothing could be lost.
    """
    step, total = parts.step, parts.total_steps
    batches = observer.measure_waits(parts.loader.steps(position.batch))
    observer.start(position.step, int(position.count), is_evaluated=not position.unevaluated)
    outcome: Outcome | None = None
    if position.unevaluated:
        outcome = evaluate_and_save(parts, position, saver, observer, health, stop, tasks)
    while outcome is None and position.step < total:
        heartbeat.begin_step(position.step + 1)
        batch = _fetch(batches, stop)
        # Ranks vote before a step, so that none waits in a collective for one that has stopped.
        if stop.agree() or batch is None:
            return save_and_stop(parts, position, saver, observer)
        lr_factor = parts.start_step(position, before_move=saver.wait_staged)
        faults.point("train.step", parts.world.rank, position.step + 1)
        step.monitors.begin(position.step + 1)
        gradients = step.accumulate(batch, lr_factor, before_update=saver.wait_staged)
        # Counted also if the step is skipped: after a rollback the batch is not read again.
        position.batch += 1
        lr = parts.peak_lr * lr_factor
        is_updated = health.should_step(gradients, position.step + 1, position.batch, lr)
        if is_updated:
            # A save in the background may still be copying the weights that change now.
            saver.wait_staged()
            step.update(lr_factor, health.is_bad)
        step.clear()
        if health.wants_rollback and _roll_back(position, saver, stop):
            observer.start(position.step, int(position.count))
            continue
        position.step += 1
        stop.defer()  # now there is work to lose: a signal waits for the end of the step
        # A tensor on the device: as a Python number it would make the host wait in each step.
        position.count = position.count + gradients.count
        parts.finish_step(position.step, is_updated=is_updated)
        is_due = observer.is_due(position.step)
        if is_due:
            health.verify()  # the row waits for the device in any case
        rates = parts.scale_rates(lr_factor)
        metrics = {**step.metrics(gradients, lr), **rates} if is_due else {}
        observer.on_step(position.step, metrics, position.count, position.batch)
        outcome = evaluate_and_save(parts, position, saver, observer, health, stop, tasks)
        if parts.gc_interval and position.step % parts.gc_interval == 0:
            gc.collect(1)  # on all ranks in the same step, see `paced_garbage_collection`
    return outcome or "finished"


def _fetch(batches: Iterator[list[Batch]], stop: StopFlag) -> list[Batch] | None:
    """Return this rank's next batch, or None if a signal came during a long wait for it."""
    try:
        with stop.interruptible():
            return next(batches)
    except StopRequested:
        return None


def _roll_back(position: Position, saver: Saver, stop: StopFlag) -> bool:
    """Restore the newest checkpoint; return False where there is none yet."""
    # A restart would do the same, so a signal may end the process at once.
    stop.end_at_once()
    went_back = saver.roll_back(position)
    stop.defer()
    return went_back


def save_and_stop(parts: Parts, position: Position, saver: Saver, observer: Observer) -> Outcome:
    """Save after a signal, and return how training ends."""
    observer.sync()  # no checkpoint is ever ahead of the rows of metrics.jsonl
    with parts.phases("checkpoint"):
        saver.save_last(position)
    return "stopped"


def evaluate_and_save(
    parts: Parts,
    position: Position,
    saver: Saver,
    observer: Observer,
    health: Health,
    stop: StopFlag,
    tasks: Tasks,
) -> Outcome | None:
    """Evaluate and save if that is due after a step.

    Returns:
        how training ends, or None if it continues.
    """
    step, total = position.step, parts.total_steps
    table, harness = parts.evaluate, parts.evaluate.harness
    splits = parts.splits if _is_due(step, table, parts) else []
    due_tasks = tasks if harness.tasks and _is_due(step, table, parts, harness.interval) else None
    position.unevaluated = False
    try:
        improved = evaluate_splits(parts, position, observer, health, stop, splits, due_tasks)
    except StopRequested:
        parts.model.train()  # the evaluation was given up before it did that
        position.unevaluated = True
        return save_and_stop(parts, position, saver, observer)
    exhausted = position.best.is_exhausted(parts.evaluate)
    saver.poll()
    last = exhausted or step == total
    best = improved and parts.checkpoint.keep_best
    if last or best or _is_due(step, parts.checkpoint, parts):
        observer.sync()
        with observer.exclude_time(), parts.phases("checkpoint"):
            if last:
                saver.save_last(position, parts.checkpoint.last)
            else:
                saver.save(position)
    return "stopped early" if exhausted else None


def evaluate_splits(
    parts: Parts,
    position: Position,
    observer: Observer,
    health: Health,
    stop: StopFlag,
    splits: Sequence[ValidationSplit],
    tasks: Tasks | None,
) -> bool:
    """Measure splits and tasks that are due, and return whether the evaluation is the best."""
    values: dict[str, float] = {}
    for split in splits:
        with observer.exclude_time(), parts.phases("evaluation"):
            numbers = validate(parts, stop, split)
        observer.on_evaluation(position.step, numbers, split.name)
        prefix = prefix_of(split.name)
        values |= {f"{prefix}{key}": value for key, value in numbers.items()}
    if splits:
        # The validation split comes first where there is one: its numbers have no prefix.
        loss = values[f"{prefix_of(splits[0].name)}loss"]
        health.check_evaluation(position.step, loss)
    if tasks:
        with observer.exclude_time(), parts.phases("tasks"):
            scores = measure_tasks(parts, tasks, stop)
        observer.on_evaluation(position.step, scores, TASKS)
        values |= scores
    if not values:
        return False
    # Splits and tasks may be due at different steps: only one of them has the followed number.
    is_measured = tasks if parts.evaluate.follows_task else splits
    is_best = bool(is_measured) and position.record_score(parts, values)
    observer.on_best(position.step, values, asdict(position.best))
    return is_best


def _is_due(step: int, table: Evaluate | Checkpoint, parts: Parts, own: int | None = None) -> bool:
    """Return whether an interval of steps or epochs has ended, or the run has.

    An interval that ends within a stride is due at the end of the stride.

    Args:
        step: finished optimizer steps.
        table: has the interval.
        parts: the parts of the run.
        own: an interval in steps that takes the place of the table's.
    """
    interval: float = table.interval if own is None else own
    if own is None and table.interval_epochs is not None:
        interval = table.interval_epochs * parts.steps_per_epoch
    # An epoch may end within a step, and is rarely a round number of steps in floating point.
    is_end = interval > 0 and (step + 1e-6) // interval > (step - parts.stride + 1e-6) // interval
    return is_end or step == parts.total_steps


@contextmanager
def paced_garbage_collection(interval: int) -> Iterator[None]:
    """Leave Python's garbage collection to the training loop.

    Otherwise ranks collect at different steps, and in each such step all others wait.

    Args:
        interval: optimizer steps between collections; 0 leaves Python's own schedule alone.
    """
    if not interval:
        yield
        return
    gc.freeze()  # modules and the model are never looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
