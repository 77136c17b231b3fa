"""The training loop: what happens, in order."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from ..core import faults
from ..core.heartbeat import heartbeat
from ..launch.signals import StopRequested
from .evaluate import validate

if TYPE_CHECKING:
    from ..data.batch import Batch
    from ..launch.signals import StopFlag
    from ..observe.observer import Number, Observer
    from .health import Health
    from .parts import Parts, Position
    from .saving import Saver
    from .step import Gradients


Outcome = Literal["finished", "stopped early", "stopped"]


def train(
    parts: Parts,
    position: Position,
    saver: Saver,
    health: Health,
    observer: Observer,
    stop: StopFlag,
) -> Outcome:
    """Train from `position` to the last step, or until evaluations or a signal say to stop.

    Until the first step is done, and while a rollback reads a checkpoint, a signal ends the process
    at once; later it waits for the end of the step, and gives up an evaluation or a wait for data.

    Raises:
        Diverged: training diverged, and the policies of `[resilience]` say to stop.
        CheckpointError: a checkpoint could not be written.
        Stopped: by a signal, while nothing can be lost.
    """
    step, total = parts.step, parts.total_steps
    batches = observer.timed(parts.loader.steps(position.batch))
    observer.start(position.step, int(position.tokens), is_evaluated=not position.unevaluated)
    outcome: Outcome | None = None
    if position.unevaluated:
        outcome = _evaluate_and_save(parts, position, saver, observer, health, stop)
    while outcome is None and position.step < total:
        heartbeat.begin_step(position.step + 1)
        batch = _fetch(batches, stop)
        if stop.agree() or batch is None:
            return _save_and_stop(parts, position, saver, observer)
        lr_factor = parts.schedule.factor(position.step, total)
        faults.point("train.step", parts.world.rank, position.step + 1)
        gradients = step.accumulate(batch, lr_factor, before_update=saver.wait_staged)
        position.batch += 1
        lr = parts.peak_lr * lr_factor
        if health.should_step(gradients, position.step + 1, position.batch, lr):
            saver.wait_staged()
            step.update(lr_factor)
        step.clear()
        if health.wants_rollback and _roll_back(position, saver, stop):
            observer.start(position.step, int(position.tokens))
            continue
        position.step += 1
        stop.defer()
        position.tokens = position.tokens + gradients.tokens
        if parts.average:
            parts.average.update(position.step)
        values = _values(gradients, lr)
        if observer.is_due(position.step):
            health.verify()
            values |= step.measures(gradients)
        observer.on_step(position.step, values, position.tokens)
        outcome = _evaluate_and_save(parts, position, saver, observer, health, stop)
        _collect_garbage(position.step, parts.gc_interval)
    return outcome or "finished"


def _fetch(batches: Iterator[list[Batch]], stop: StopFlag) -> list[Batch] | None:
    """Return this rank's next batch; None: it was asked to stop while it waited long for that."""
    try:
        with stop.giving_up():
            return next(batches)
    except StopRequested:
        return None


def _roll_back(position: Position, saver: Saver, stop: StopFlag) -> bool:
    """Go back to the newest checkpoint, which is also what a restart would do; see `Saver`."""
    stop.end_at_once()
    went_back = saver.roll_back(position)
    stop.defer()
    return went_back


def _save_and_stop(parts: Parts, position: Position, saver: Saver, observer: Observer) -> Outcome:
    observer.sync()
    with parts.phases("checkpoint"):
        saver.save_last(position)
    return "stopped"


def _evaluate_and_save(
    parts: Parts,
    position: Position,
    saver: Saver,
    observer: Observer,
    health: Health,
    stop: StopFlag,
) -> Outcome | None:
    """Do what is due after a step; return how the run ends, if it ends here."""
    step, total = position.step, parts.total_steps
    due = _is_due(step, parts.evaluate.interval, total) and parts.validation
    position.unevaluated = False
    try:
        improved = bool(due) and _evaluate(parts, position, observer, health, stop)
    except StopRequested:
        parts.model.train()
        position.unevaluated = True
        return _save_and_stop(parts, position, saver, observer)
    exhausted = position.best.is_exhausted(parts.evaluate)
    saver.poll()
    last = exhausted or step == total
    best = improved and parts.checkpoint.keep_best
    if last or best or _is_due(step, parts.checkpoint.interval, total):
        observer.sync()
        with observer.paused(), parts.phases("checkpoint"):
            if last:
                saver.save_last(position, parts.checkpoint.last)
            else:
                saver.save(position)
    return "stopped early" if exhausted else None


def _values(gradients: Gradients, lr: float) -> dict[str, Number]:
    loss = gradients.loss / gradients.tokens.clamp(min=1)
    return {
        "loss": loss,
        "total_loss": gradients.total_loss,
        "grad_norm": gradients.norm,
        "lr": lr,
    }


def _collect_garbage(step: int, interval: int) -> None:
    if interval and step % interval == 0:
        gc.collect(1)


def _evaluate(
    parts: Parts, position: Position, observer: Observer, health: Health, stop: StopFlag
) -> bool:
    """Measure the validation loss; return whether it is the best so far."""
    with observer.paused(), parts.phases("evaluation"):
        values = validate(parts, stop)
    observer.on_evaluation(position.step, values)
    health.take_evaluation(position.step, values["loss"])
    return position.best.take(parts.evaluate, position.step, values)


def _is_due(step: int, interval: int, total: int) -> bool:
    return step == total or (interval > 0 and step % interval == 0)


@contextmanager
def paced_garbage_collection(interval: int) -> Iterator[None]:
    """Leave Python's garbage collection to the training loop, if `interval` is not 0.

    Ranks that collect at different steps wait for each other.
    """
    if not interval:
        yield
        return
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
