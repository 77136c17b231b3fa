"""What a rank's step needs, from simulations of a few blocks and micro batches.

Blocks are alike, and so are micro batches after the first: everything that is counted grows with
the product of a line over the blocks and a line over the micro batches. Four small simulations
give all of it, exactly, at any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...optim.groups import matcher
from ...parallel.mesh import AXES, Degrees
from ...parallel.pipeline.cut import cut_blocks, num_micro_batches, stage_holders
from ...recipe.placements import placements
from .collectives import ALL_REDUCE, Route
from .count import StepCounts, count_step
from .instrumented import empty_batches, rows_of
from .simulate import simulated_step

if TYPE_CHECKING:
    from ...data.batch import Batch
    from ...parallel.plan import Plan
    from ...recipe.schema import Recipe
    from ...train.step import TrainStep

ALIKE = ("none", "full", "selective")
"""values of memory.recompute under which blocks are alike"""
PIPELINE = 3
"""ranks of a small pipeline: a first one, a last one, and one that stands for all between them"""
MOST_STAGES = 3
"""With more stages a rank gives weights back and gathers them again, as the schedule will have it
(`_add_unshard_reshard` in torch.distributed.pipelining.schedules)."""
DDP_BUCKET = 25 * 2**20
"""bytes of one all-reduce, as DDP has it by default"""


class _Size(NamedTuple):
    """Of a simulated run.

    Attributes:
        pipeline: its ranks.
        blocks: of each stage; None: as the recipe says.
        micro_batches: of a step; None: as the recipe says.
    """

    pipeline: int
    blocks: int | None
    micro_batches: int | None


class RankCounter:
    """Counts what the ranks of a run need; small simulations are shared among them.

    Args:
        recipe: validated for that many ranks.
        ranks: of the run.
        vocab_size: of the tokenizer.
        on_gpu: see `simulate`.
    """

    def __init__(self, recipe: Recipe, ranks: int, vocab_size: int, *, on_gpu: bool) -> None:
        self._recipe, self._ranks, self._vocab_size = recipe, ranks, vocab_size
        self.degrees = recipe.parallel.degrees.resolve(ranks)
        self._simulated = cache(partial(self._simulate, on_gpu=on_gpu))
        table, pipeline = recipe.parallel.pipelining, self.degrees.pipeline
        stages = len(stage_holders(table, pipeline)) if pipeline > 1 else 1
        self._stages_a_rank = stages // pipeline
        share = recipe.data.global_batch // self.degrees.data
        self.micro_batches = num_micro_batches(
            table if pipeline > 1 else type(table)(), recipe.data.micro_batch, share
        )
        self._layers = int(getattr(recipe.model, "n_layers", 0))
        self._sizes = self._small_sizes()

    def count(self, place: int) -> StepCounts:
        """Return what the first rank of a place in the pipeline needs in one step."""
        pipeline, blocks, micro_batches = self._sizes
        place_there = place
        if pipeline < self.degrees.pipeline:
            last = self.degrees.pipeline - 1
            place_there = {0: 0, last: pipeline - 1}.get(place, 1)
        samples = [
            [self._simulated(place_there, _Size(pipeline, b, m)) for m in micro_batches or (None,)]
            for b in blocks or (None,)
        ]
        rows = [_on_line(row, micro_batches, self.micro_batches) for row in samples]
        held = tuple(each * self._stages_a_rank for each in blocks)
        return _on_line(rows, held, self.num_blocks(place))

    def num_blocks(self, place: int) -> int:
        """Return how many blocks the ranks of a place hold."""
        if self.degrees.pipeline == 1:
            return self._layers
        config = self._recipe.model.with_vocab(self._vocab_size)
        cut = cut_blocks(self._recipe.parallel.pipelining, self.degrees.pipeline, config)
        return sum(len(cut.blocks(stage)) for stage in cut.stages_of(place))

    def _small_sizes(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return ranks of a pipeline, and of how many blocks and micro batches; empty: all."""
        pipeline, stages = self.degrees.pipeline, self._stages_a_rank * self.degrees.pipeline
        blocks = (1, 2) if self._layers > 2 * stages and self._blocks_are_alike() else ()
        table = self._recipe.parallel.pipelining
        if table.csv or self._stages_a_rank > MOST_STAGES:
            return pipeline, () if table.csv else blocks, ()
        if blocks:
            pipeline = min(pipeline, PIPELINE)
        least = pipeline * (self._stages_a_rank if table.schedule == "DualPipeV" else 1)
        micro_batches = (least, 2 * least) if self.micro_batches > 2 * least else ()
        return pipeline, blocks, micro_batches

    def _blocks_are_alike(self) -> bool:
        start = f"{self._recipe.model.layout.blocks}."
        groups = [matcher(group.match) for group in self._recipe.optimizer.groups]
        found: dict[str, list[Hashable]] = {}
        for each in placements(self._recipe, self.degrees, self._vocab_size):
            if each.name.startswith(start):
                block, _, name = each.name.removeprefix(start).partition(".")
                group = tuple(matches(each.name) for matches in groups)
                where = name, *each.place.items(), each.shape, each.decided_by, group
                found.setdefault(block, []).append(where)
        alike = bool(found) and len({tuple(block) for block in found.values()}) == 1
        return alike and self._recipe.memory.recompute in ALIKE

    def _simulate(self, place: int, size: _Size, *, on_gpu: bool) -> StepCounts:
        recipe = _resized(self._recipe, self.degrees, self._stages_a_rank, size)
        inner = self._ranks // self.degrees.pipeline
        rank, ranks = place * inner, size.pipeline * inner
        with simulated_step(recipe, rank, ranks, self._vocab_size, on_gpu=on_gpu) as (
            simulated,
            step,
            plan,
        ):
            counts = count_step(step, step_batches(simulated, step, plan), rank)
            if plan.mesh is None and self.degrees.dp_cp > 1:
                _add_ddp(counts, simulated, step)
        return counts


def step_batches(recipe: Recipe, step: TrainStep, plan: Plan) -> list[Batch]:
    """Return what a rank computes in a step, of no content."""
    model = step.parallel_model.model
    return [plan.take(each, model) for each in empty_batches(recipe, *rows_of(recipe, step))]


def _resized(recipe: Recipe, degrees: Degrees, stages_a_rank: int, size: _Size) -> Recipe:
    """Return a recipe for fewer blocks, micro batches and ranks of a pipeline."""
    parallel, data, model = recipe.parallel, recipe.data, recipe.model
    given = degrees.by_axis | {"pipeline": size.pipeline}
    pipelining = parallel.pipelining
    if size.blocks is not None:
        stages = stages_a_rank * size.pipeline
        model = model.model_copy(update={"n_layers": stages * size.blocks})
        if size.pipeline > 1:
            pipelining = pipelining.model_copy(
                update={"layers_per_stage": [size.blocks] * stages, "modules_per_stage": []}
            )
    if size.micro_batches is not None:
        share = data.global_batch // degrees.data
        rows = min(data.micro_batch, share)
        if size.pipeline > 1:
            rows = share // num_micro_batches(pipelining, data.micro_batch, share)
            pipelining = pipelining.model_copy(update={"micro_batches": size.micro_batches})
        data = data.model_copy(update={"global_batch": rows * size.micro_batches * degrees.data})
    parallel = parallel.model_copy(update={**given, "pipelining": pipelining})
    return recipe.model_copy(update={"parallel": parallel, "data": data, "model": model})


def _add_ddp(counts: StepCounts, recipe: Recipe, step: TrainStep) -> None:
    """Add the reduction of gradients by DDP, for which a simulation has a stand-in."""
    width = torch.bfloat16.itemsize if recipe.precision.reduce == "bf16" else None
    size = sum(
        each.numel() * (width or each.dtype.itemsize)
        for each in step.parallel_model.model.parameters()
        if each.requires_grad
    )
    axes = tuple(axis for axis in AXES if getattr(step.degrees, axis) > 1)
    counts.message_bytes[Route(axes, ALL_REDUCE)] += size
    counts.calls[Route(axes, ALL_REDUCE)] += -(-size // DDP_BUCKET)


def _on_line(samples: Sequence[StepCounts], xs: Sequence[int], x: int) -> StepCounts:
    """Return the counts at `x` of lines through those at one or two `xs`."""
    if not xs:
        (only,) = samples
        return only
    (x0, x1), (low, high) = xs, samples
    found: dict[str, Any] = {}
    for field in fields(StepCounts):
        a, b = getattr(low, field.name), getattr(high, field.name)
        found[field.name] = Counter(
            {key: a[key] + (b[key] - a[key]) * (x - x0) // (x1 - x0) for key in {*a, *b}}
        )
    return StepCounts(**found)
