"""The training loop: what happens, in order."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Literal

from ..heartbeat import heartbeat
from .evaluate import validate

if TYPE_CHECKING:
    from ..assemble import Parts
    from ..launch.signals import StopFlag
    from ..observe.observer import Number, Observer
    from .health import Health
    from .position import Position
    from .saving import Saver
    from .step import Gradients


def train(
    parts: Parts,
    position: Position,
    saver: Saver,
    health: Health,
    observer: Observer,
    stop: StopFlag,
) -> Literal["finished", "stopped early", "stopped"]:
    """Train from `position` to the last step, or until evaluations or a signal say to stop.

    Raises:
        Diverged: training diverged, and the policies of `[resilience]` say to stop.
        CheckpointError: a checkpoint could not be written.
    """
    recipe, step, total = parts.recipe, parts.step, parts.total_steps
    batches = observer.timed(parts.loader.steps(position.batch))
    observer.start(position.step, int(position.tokens))
    while position.step < total:
        heartbeat.begin_step(position.step + 1)
        if stop.agree():
            observer.sync()
            with step.phase("checkpoint"):
                saver.save_last(position)
            return "stopped"
        lr_factor = recipe.schedule.factor(position.step, total)
        step.set_rate(lr_factor)
        gradients = step.accumulate(next(batches))
        position.batch += 1
        lr = recipe.optimizer.lr * lr_factor
        if health.admits(gradients, position.step + 1, position.batch, lr):
            step.update(lr_factor)
        step.clear()
        if health.wants_rollback and saver.roll_back(position):
            observer.start(position.step, int(position.tokens))
            continue
        position.step += 1
        position.tokens = position.tokens + gradients.tokens
        if parts.average:
            parts.average.update(position.step)
        values = _values(gradients, lr)
        if observer.is_due(position.step):
            health.verify()
            values |= step.measures(gradients)
        observer.on_step(position.step, values, position.tokens)
        if _evaluate_and_save(parts, position, saver, observer, health):
            return "stopped early"
        _collect_garbage(position.step, recipe.run.gc_interval)
    return "finished"


def _evaluate_and_save(
    parts: Parts, position: Position, saver: Saver, observer: Observer, health: Health
) -> bool:
    """Do what is due after a step; return whether evaluations say that the run ends early."""
    recipe, step, total = parts.recipe, position.step, parts.total_steps
    due = _is_due(step, recipe.evaluate.interval, total) and parts.validation
    improved = bool(due) and _evaluate(parts, position, observer, health)
    exhausted = position.best.is_exhausted(recipe.evaluate)
    saver.poll()
    last = exhausted or step == total
    best = improved and recipe.checkpoint.keep_best
    if last or best or _is_due(step, recipe.checkpoint.interval, total):
        observer.sync()
        with observer.paused(), parts.step.phase("checkpoint"):
            if last:
                saver.save_last(position, recipe.checkpoint.last)
            else:
                saver.save(position)
    return exhausted


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


def _evaluate(parts: Parts, position: Position, observer: Observer, health: Health) -> bool:
    """Measure the validation loss; return whether it is the best so far."""
    with observer.paused(), parts.step.phase("evaluation"):
        values = validate(parts)
    observer.on_evaluation(position.step, values)
    health.take_evaluation(position.step, values)
    return position.best.take(parts.recipe.evaluate, position.step, values)


def _is_due(step: int, interval: int, total: int) -> bool:
    return step == total or (interval > 0 and step % interval == 0)
