"""The loss and other measures of the validation split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.summation import sum_dtype
from ..core import faults
from ..core.heartbeat import heartbeat
from ..data.batch import Batch
from ..launch.signals import StopFlag, StopRequested
from ..parallel.axis import ParallelModel
from ..parallel.mesh import Degrees
from ..tasks.metrics.metric_set import MetricSet
from ..tasks.task import Task
from .parts import Parts, ValidationSplit

Tasks = Callable[[Callable[[], None]], dict[str, float]]
"""measures tasks and returns their scores, the same on all ranks; see `measure_tasks`"""


def validate(
    parts: Parts, stop: StopFlag | None = None, split: ValidationSplit | None = None
) -> dict[str, float]:
    """Measure a split, on all ranks together, with the averaged weights if any.

    Args:
        parts: the parts of the run.
        stop: asked before each batch; None never stops.
        split: what is measured; None: the validation split.

    Returns:
        `loss` and the other numbers of the task, the same on all ranks.

    Raises:
        StopRequested: on all ranks, because a signal asked one of them to stop.
    """
    split = split or parts.splits[0]
    with parts.average.swap_in() if parts.average else nullcontext():
        return evaluate(
            parts.parallel_model,
            lambda: stop_on_signal(split.batches, stop) if stop else split.batches,
            split.task,
            parts.device,
            parts.degrees,
            split.metrics,
        )


def measure_tasks(parts: Parts, tasks: Tasks, stop: StopFlag) -> dict[str, float]:
    """Return the scores of tasks, on all ranks together, with the averaged weights if any.

    Args:
        parts: the parts of the run.
        tasks: measures the model; called with what it has to call before each forward pass.
        stop: asked before each forward pass.

    Raises:
        StopRequested: on all ranks, because a signal asked one of them to stop.
    """

    def check() -> None:
        heartbeat.touch()
        faults.point("train.tasks")
        if stop.agree():
            raise StopRequested

    with (
        parts.average.swap_in() if parts.average else nullcontext(),
        # As in `stop_on_signal`: one process may give up anywhere, several only together.
        stop.interruptible() if stop.is_alone else nullcontext(),
    ):
        return tasks(check)


def stop_on_signal(batches: Iterable[Batch], stop: StopFlag) -> Iterator[Batch]:
    """Yield batches until a signal asks any rank to stop.

    Args:
        batches: this rank's batches, equally many on each rank.
        stop: knows whether a signal came.

    Raises:
        StopRequested: a signal came.
    """
    for number, batch in enumerate(batches):
        faults.point("train.evaluate", step=number)
        if stop.agree():
            raise StopRequested
        # One process may give up within a batch (the first one compiles). Of several ranks none
        # may: the others would wait for it in a collective.
        with stop.interruptible() if stop.is_alone else nullcontext():
            yield batch


@torch.no_grad()
def evaluate(
    parallel_model: ParallelModel,
    read: Callable[[], Iterable[Batch]],
    task: Task[Any],
    device: torch.device,
    degrees: Degrees,
    metrics: MetricSet | None = None,
) -> dict[str, float]:
    """Measure a task over all batches on all ranks.

    Args:
        parallel_model: the model, wrapped for distributed training.
        read: returns this rank's batches, equally many on each rank; a task that compares samples
            with all others reads them twice.
        task: what is measured.
        device: the device of the model.
        degrees: the ranks along each axis.
        metrics: further measures of the outputs.

    Returns:
        the numbers that `Task.evaluation` gives, `loss` and others, and the metrics.
    """
    # The unwrapped module: DDP has nothing to do without gradients.
    model, pipeline = parallel_model.model, parallel_model.pipeline
    model.eval()
    sums = torch.zeros(task.num_sums, dtype=sum_dtype(device), device=device)
    counts: Tensor | None = None
    if metrics:
        metrics.clear()  # of an evaluation that was given up
    task = task.prepare_validation(_move(read(), device), parallel_model)
    for moved in _move(read(), device):
        (batch,) = task.prepare([moved], parallel_model)
        batch_counts = task.evaluation_counts(batch)
        if counts is None:
            counts = torch.zeros_like(batch_counts, dtype=sum_dtype(device))
        if pipeline:
            sums += pipeline.evaluate(batch, task)
            record = pipeline.take_record()
        else:
            record = task.record(batch)
            sums += record.sums(task.forward(model, batch, record))
        # Stages other than the last have no loss, and count nothing.
        if pipeline is None or pipeline.has_end:
            counts += batch_counts
        if metrics and record and (pair := record.predictions()):
            metrics.update(*pair)
    assert counts is not None, "validation has batches"
    if degrees.world > 1:
        # Ranks with the same samples add them several times: ratios do not change.
        both = torch.cat([sums, counts])
        dist.all_reduce(both)
        sums, counts = both[: len(sums)], both[len(sums) :]
    model.train()
    numbers = task.evaluation(sums.tolist(), counts.tolist())
    return numbers | metrics.compute() if metrics else numbers


def _move(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in batches:
        heartbeat.touch()  # each batch is progress: a long evaluation is no hang
        yield batch.to(device)
