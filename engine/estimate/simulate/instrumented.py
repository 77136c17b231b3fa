"""A step under the eyes of a tracker, real or simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...data.batch import Batch
from ...optim.lean import plain_step
from ...train.average import WeightAverage
from .shorten import StageCoordinate
from .tracker import (
    BATCH,
    GRADIENTS,
    IN_CPU_MEMORY,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    MemoryTracker,
)

if TYPE_CHECKING:
    from ....model_zoo.language_model import LanguageModel, LossFunction
    from ...recipe.schema import Recipe
    from ...train.step import TrainStep


def track(
    recipe: Recipe,
    step: TrainStep,
    take: Callable[[Batch, LanguageModel], Batch],
    *,
    steps: int = 1,
    owns_gradient_buffers: bool = False,
    on_gpu: bool = False,
    left: int = 0,
) -> MemoryTracker:
    """Run a rank's steps, real or simulated, and return what was counted.

    Args:
        recipe: of the run.
        step: of this rank.
        take: what this rank computes of the rows that its group reads; see `Plan.take`.
        steps: how many; before a single one the optimizer gets its state.
        owns_gradient_buffers: memory for gradients is never given back, as under DDP.
        on_gpu: what is offloaded does not count.
        left: rows that the step is lacking: they are held, but not computed.
    """
    watched = _Watched(recipe, step, on_gpu)
    share, rows = rows_of(recipe, step)
    model = step.parallel_model.model
    with MemoryTracker() as tracker:
        watched.begin(tracker)
        if steps == 1:
            watched.prime(tracker)
        for _ in range(steps):
            if owns_gradient_buffers:
                watched.make_gradients(tracker)
            with tracker.labelled(BATCH):
                every = (empty_batches(recipe, many, rows) for many in (share, left))
                batches, others = ([take(batch, model) for batch in some] for some in every)
            watched.step.accumulate(batches, lr_factor=1.0)
            watched.update(tracker)
            del batches, others
    return tracker


class _Watched:
    """A step whose parts and blocks tell a tracker where they begin."""

    def __init__(self, recipe: Recipe, step: TrainStep, on_gpu: bool) -> None:
        self.step, self.model = step, step.parallel_model.model
        self.offloaded = on_gpu and recipe.parallel.fsdp.offload
        self.weights = [each for each in self.model.parameters() if each.requires_grad]
        self.average = WeightAverage(self.model, recipe.ema) if recipe.ema.decay else None
        self.interval, self.blocks = recipe.ema.interval, recipe.model.layout.blocks

    def begin(self, tracker: MemoryTracker) -> None:
        """Count what exists before the first step."""
        self._add(tracker, self.model.parameters(), PARAMETERS)
        tracker.add(self.model.buffers(), PARAMETERS)
        if self.average:
            self._add(tracker, self.average._averages.values(), OPTIMIZER)
        self.step = replace(
            self.step, loss=_labelled(self.step.loss, tracker), phase=_phases(tracker)
        )
        self._watch_blocks(tracker)

    def _add(self, tracker: MemoryTracker, tensors: Any, kind: str) -> None:
        tracker.add(tensors, IN_CPU_MEMORY if self.offloaded else kind)

    def prime(self, tracker: MemoryTracker) -> None:
        """Let the optimizer make its state, of gradients without content."""
        tracker.enter("first update")
        self.make_gradients(tracker)
        with tracker.labelled(TEMPORARY):
            plain_step(self.step.optimizer)()  # also where a step does it in the backward pass
        self._clear(tracker)

    def make_gradients(self, tracker: MemoryTracker) -> None:
        """Give each weight a gradient without content."""
        with tracker.labelled(GRADIENTS):
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)

    def update(self, tracker: MemoryTracker) -> None:
        """Say what gradients and state are, and let the weights change."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        self._add(tracker, gradients, GRADIENTS)
        del gradients
        with tracker.labelled(TEMPORARY):
            self.step.update(1.0)
            if self.average:
                self.average.update(self.interval)
        self._clear(tracker)

    def _clear(self, tracker: MemoryTracker) -> None:
        state = tree_leaves([*self.step.optimizer.state.values()])
        self._add(tracker, [each for each in state if isinstance(each, Tensor)], OPTIMIZER)
        self.step.clear()

    def _watch_blocks(self, tracker: MemoryTracker) -> None:
        pipeline = self.step.parallel_model.pipeline
        blocks = dict(self.model.get_submodule(self.blocks).named_children())
        stages = (
            {
                number: [str(block) for block in pipeline.cut.blocks(number)]
                for number in pipeline.stages
            }
            if pipeline
            else {0: list(blocks)}
        )
        for stage, names in stages.items():
            for place, name in enumerate(names):
                _watch(
                    blocks[name],
                    tracker,
                    partial(StageCoordinate, stage=stage, block=place, blocks=len(names)),
                )


def _watch(block: nn.Module, tracker: MemoryTracker, place: Callable[..., StageCoordinate]) -> None:
    """Tell a tracker when a block's passes begin, and when its forward pass ends."""
    number = 0

    def before(*_: Any) -> None:
        nonlocal number
        number += 1
        tracker.enter(place("forward", number=number))

    def after(_module: Any, _args: Any, out: Tensor) -> None:
        tracker.enter(place("after", number=number))
        if out.requires_grad:
            out.register_hook(partial(backward, number))  # type: ignore[no-untyped-call]

    def backward(count: int, _: Tensor) -> None:
        tracker.enter(place("backward", number=count))

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after, prepend=True)


def _phases(tracker: MemoryTracker) -> Callable[[str], Any]:
    counts: Counter[str] = Counter()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        counts[name] += 1
        tracker.enter((name, counts[name]))
        yield
        tracker.enter(("after", name, counts[name]))

    return phase


def _labelled(loss: LossFunction, tracker: MemoryTracker) -> LossFunction:
    def counted(*args: Tensor, **options: Any) -> Tensor:
        with tracker.labelled(LOSS):
            return loss(*args, **options)

    return counted


def rows_of(recipe: Recipe, step: TrainStep) -> tuple[int, int]:
    """Return a rank's rows of a step, and how many a batch has: a pipeline cuts one of all."""
    share = recipe.data.global_batch // step.degrees.data
    return share, share if step.parallel_model.pipeline else min(recipe.data.micro_batch, share)


def empty_batches(recipe: Recipe, share: int, rows: int) -> list[Batch]:
    """Return the rows of a step, of no content."""
    batches = []
    for first in range(0, share, rows):
        shape = (min(rows, share - first), recipe.data.seq_len)
        tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        positions = documents = padding = None
        if recipe.data.packing == "documents":
            positions = torch.zeros(shape, dtype=torch.int64)
            documents = torch.zeros(shape, dtype=torch.int32)
        if recipe.data.packing != "concat":
            padding = torch.zeros(shape, dtype=torch.bool)
        batches.append(Batch(tokens, labels, positions, documents, padding_mask=padding))
    return batches
