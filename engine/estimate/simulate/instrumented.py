"""Runs a training step, real or simulated, under a memory tracker that knows its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.torch_private import tree_leaves
from ....model_zoo.base import Model
from ...data.batch import Batch
from ...data.tables import Data
from ...train.average import WeightAverage
from ...train.lookahead import Lookahead
from ...train.step import TrainStep
from ...train.tables import EMA
from .build import empty_batches, samples_of
from .torch_internals import replace_attribute
from .tracker import (
    BATCH,
    GRADIENTS,
    IN_CPU_MEMORY,
    LOSS,
    MONITORS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    MemoryTracker,
)

NUM_ENDS = 2
"""blocks at each end of a stage whose segments have the same names in stages of any length"""


@dataclass(frozen=True)
class BlockSegment:
    """A part of a step: the forward or backward pass of a block and what follows it.

    Attributes:
        what: the forward or backward pass.
        stage: the pipeline stage.
        micro_batch: the number of the micro batch.
        block: the number of the block in the stage, from 0.
        blocks: the number of blocks of the stage.
    """

    what: str
    stage: int
    micro_batch: int
    block: int
    blocks: int

    def names(self) -> Iterator[Hashable]:
        """Yield names of this segment that do not depend on the number of blocks in the stage."""
        from_end = self.blocks - 1 - self.block
        if self.block < NUM_ENDS:
            yield "from start", self.what, self.stage, self.micro_batch, self.block
        if from_end < NUM_ENDS:
            yield "from end", self.what, self.stage, self.micro_batch, from_end


def track(
    step: TrainStep,
    take: Callable[[Batch, Model], Batch],
    data: Data,
    blocks: str,
    *,
    ema: EMA | None = None,
    offloads: bool = False,
    steps: int = 1,
    owns_gradient_buffers: bool = False,
    left: int = 0,
    compiles: bool = False,
) -> MemoryTracker:
    """Run a rank's steps, real or simulated, and return the tracker that measured the memory.

    Args:
        step: the rank's training step.
        take: selects this rank's part of the rows that its group reads; see `Plan.take`.
        data: the recipe's `[data]` table.
        blocks: the module path of the model's blocks; empty without any.
        ema: the recipe's `[ema]` table; None if weights are not averaged.
        offloads: weights, gradients and optimizer state are in CPU memory and are not counted.
        steps: the number of steps. If it is 1, the optimizer state is created before the step.
        owns_gradient_buffers: gradient memory is never freed, as under DDP.
        left: samples of the step that are held but not computed.
        compiles: the run compiles its blocks; the blocks of `step` are eager.
    """
    tracker = MemoryTracker()
    model, (share, size) = step.parallel_model.model, samples_of(data, step)
    homes = (IN_CPU_MEMORY,) * 3 if offloads else (PARAMETERS, GRADIENTS, OPTIMIZER)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    label = partial(_label, tracker)
    task = step.task.wrap_loss(partial(label, LOSS))
    watched = replace(step, task=task, phase=_phases(tracker))
    measure = label(IN_CPU_MEMORY if offloads else MONITORS, step.monitors.before_update)

    with tracker, replace_attribute(step.monitors, "before_update", measure):
        for each in (model, *([step.task.frozen.model] if step.task.frozen else [])):
            tracker.add(each.parameters(), homes[0])
            tracker.add(each.buffers(), PARAMETERS)
        start_step, finish_step = _average_weights(model, ema, tracker, homes[2])
        _watch_blocks(step, blocks, tracker, compiles=compiles)
        if steps == 1:
            tracker.enter("first update")
            _make_gradients(weights, tracker)
            with tracker.labelled(TEMPORARY):
                step.weight_update.run_step()  # also where a step does it in the backward pass
            _end_step(step, tracker, homes[2])
        for _ in range(steps):
            if owns_gradient_buffers:
                _make_gradients(weights, tracker)
            with tracker.labelled(BATCH):
                batches = [take(batch, model) for batch in empty_batches(step.task, share, size)]
                others = [take(batch, model) for batch in empty_batches(step.task, left, size)]
            watched.monitors.begin(0)  # all are due
            start_step()
            watched.accumulate(batches, lr_factor=1.0)
            tracker.add([w.grad for w in weights if w.grad is not None], homes[1])
            with tracker.labelled(TEMPORARY):
                watched.update(1.0)
                finish_step()
            _end_step(step, tracker, homes[2])
            del batches, others
    return tracker


def _average_weights(
    model: Model, ema: EMA | None, tracker: MemoryTracker, home: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make the averages of the weights, and return what starts and finishes a step of theirs."""
    average = WeightAverage(model, ema) if ema and ema.decay else None
    ahead = Lookahead(model, ema.nesterov, 1) if ema and ema.nesterov.scale else None
    tracker.add(average._averages.values() if average else (), home)
    tracker.add(ahead.state().values() if ahead else (), home)

    def start() -> None:
        if ahead:
            with tracker.labelled(TEMPORARY):
                ahead.start(0, 1.0)

    def finish() -> None:
        if ahead:
            ahead.finish(is_updated=True)
        if average and ema:
            average.update(ema.interval)

    return start, finish


def _label(tracker: MemoryTracker, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose tensors count as a kind."""

    def compute(*args: Any, **options: Any) -> Any:
        with tracker.labelled(kind):
            return function(*args, **options)

    return compute


def _make_gradients(weights: Iterable[nn.Parameter], tracker: MemoryTracker) -> None:
    with tracker.labelled(GRADIENTS):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)


def _end_step(step: TrainStep, tracker: MemoryTracker, home: str) -> None:
    """Count the optimizer's state, and free the gradients."""
    state = tree_leaves([*step.optimizer.state.values()])
    tracker.add([value for value in state if isinstance(value, Tensor)], home)
    step.clear()


def _phases(tracker: MemoryTracker) -> Callable[[str], Any]:
    counts: Counter[str] = Counter()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        counts[name] += 1
        tracker.enter((name, counts[name]))
        yield
        tracker.enter(("after", name, counts[name]))

    return phase


def _watch_blocks(step: TrainStep, path: str, tracker: MemoryTracker, *, compiles: bool) -> None:
    """Tell a tracker when the passes of each block begin."""
    if not path:  # the model names no blocks
        return
    blocks = dict(step.parallel_model.model.get_submodule(path).named_children())
    stages = {0: list(blocks)}
    if pipeline := step.parallel_model.pipeline:
        stages = {n: [str(block) for block in pipeline.cut.held_blocks(n)] for n in pipeline.stages}
    for stage, names in stages.items():
        for number, name in enumerate(names):
            segment = partial(BlockSegment, stage=stage, block=number, blocks=len(names))
            _watch_block(blocks[name], tracker, segment, compiles=compiles)


def _watch_block(
    block: nn.Module,
    tracker: MemoryTracker,
    segment: Callable[..., BlockSegment],
    *,
    compiles: bool,
) -> None:
    """Tell a tracker when a block's passes begin, and when its forward pass ends."""
    number = 0

    def before(*_: Any) -> None:
        nonlocal number
        number += 1
        tracker.enter(segment("forward", micro_batch=number))

    def after(_module: Any, _args: Any, out: Tensor) -> None:
        if compiles:
            tracker.discard_unread()
        tracker.enter(segment("after", micro_batch=number))
        if out.requires_grad:
            out.register_hook(partial(backward, number))  # type: ignore[no-untyped-call]

    def backward(count: int, _: Tensor) -> None:
        tracker.enter(segment("backward", micro_batch=count))

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after, prepend=True)
