"""Extrapolates the cost of a run from simulations of a few blocks and micro batches.

Blocks are identical, and so are micro batches after the first few. Every count of a step is linear
in the number of each, so a few short runs determine it exactly. A process can simulate only one
rank at a time, because process groups are global in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ...core.local import local
from ...observe.tables import Metrics
from ...optim.optimizers import AdamW
from ...parallel.mesh import expert_grid
from ...parallel.pipeline.cut import SPLIT_BACKWARD
from ...precision.hardware import DTYPES
from ...recipe.placements import placements
from ...recipe.schema import Recipe
from ..groups import ALL_REDUCE
from .build import SimulatedRank, simulate_rank, step_batches
from .collectives import Route
from .count import StepCounts, count_step, extrapolate_counts
from .instrumented import NUM_ENDS, BlockSegment, track
from .sizes import RunSize, enough_micro_batches, have_identical_blocks, resize, size_of
from .torch_internals import fake_process_group
from .tracker import COMMUNICATION, RECEIVED, MemoryPeak
from .update import count_update

SHORTEST = NUM_ENDS + 1
"""blocks of the shorter of two tracked runs: the first, the last, and an inner block"""
SMALL_PIPELINE = 3
"""ranks of a short pipeline: the first, the last, and one that stands for all inner ranks"""
MOST_STAGES = 3
"""With more stages a rank frees weights and gathers them again, as the schedule decides
(`_add_unshard_reshard` in torch.distributed.pipelining.schedules)."""
DDP_BUCKET = 25 * 2**20
"""bytes of one all-reduce, DDP's default"""


class ScoringAdamW(AdamW):
    """AdamW in the place of an optimizer that reads attention scores, which are measured."""

    bounds_scores = True


@dataclass(frozen=True)
class Simulation:
    """The simulated memory of a rank.

    Attributes:
        rank: the rank.
        peak_bytes: the largest sum of live tensors on the device; offloaded tensors do not count.
        at_peak: the bytes of each kind of tensor at the peak.
        block_bytes: bytes of one block's all-gathered weights and unreduced gradients; 0 without
            FSDP.
    """

    rank: int
    peak_bytes: int
    at_peak: dict[str, int]
    block_bytes: int


def simulate_memory(
    recipe: Recipe,
    rank: int,
    ranks: int,
    vocab_size: int,
    *,
    on_gpu: bool = False,
    whole: bool = False,
) -> Simulation:
    """Simulate the memory of a rank's training steps.

    Args:
        recipe: the recipe, validated for that many ranks.
        rank: the rank to simulate.
        ranks: the world size.
        vocab_size: the tokenizer's vocabulary size.
        on_gpu: compute as a GPU would; see `simulate_rank`.
        whole: simulate all blocks and micro batches.
    """
    # A pattern may match weights of some blocks alone.
    whole = whole or not all(monitor.measures_all for monitor in recipe.metrics.monitors)
    size = size_of(recipe, ranks, vocab_size)
    place = size.degrees.coordinate(rank).pipeline
    count, steps = size.micro_batches, 0
    if not whole:
        count = enough_micro_batches(recipe.parallel.pipelining, size, place)
        # A rank's share of the matrices is not linear in the number of blocks.
        if not recipe.optimizer.needs_matrices:
            steps = _spare_blocks(recipe.parallel.pipelining.schedule, size, place)
    recipe = resize(recipe, size, micro_batches=count if count < size.micro_batches else 0)
    short = [
        resize(recipe, size, blocks=[max(1, blocks - less) for blocks in size.blocks])
        for less in ((steps, steps + 1) if steps else ())
    ]
    with fake_process_group(rank, ranks):
        if short and not have_identical_blocks([recipe, *short], size.degrees, vocab_size):
            short = []
        runs: list[dict[Any, MemoryPeak]] = []
        block_bytes = 0
        for shortened in short or [recipe]:
            with simulate_rank(shortened, rank, ranks, vocab_size, on_gpu=on_gpu) as simulated:
                runs.append(_segment_peaks(simulated, size, count, offloads=on_gpu))
                block_bytes = _gathered_bytes(simulated)
    peaks = _extend(runs[0], runs[1], steps) if short else runs[0].values()
    peak = max(peaks, key=lambda peak: peak.total)
    peak.kinds[COMMUNICATION] += peak.kinds.pop(RECEIVED, 0)
    at_peak = {kind: held for kind, held in sorted(peak.kinds.items()) if held}
    return Simulation(rank, peak.total, at_peak, block_bytes)


def _spare_blocks(schedule: str, size: RunSize, place: int) -> int:
    """Return the number of blocks by which each stage of a tracked run can be shortened."""
    if size.degrees.pipeline > 1 and schedule in SPLIT_BACKWARD:
        return 0  # no hook tells when the backward pass of a block's weights begins
    spare = min(size.blocks[stage] for stage in size.stages_of(place)) - SHORTEST - 1
    return spare if spare * 2 >= SHORTEST else 0  # else a short run saves no time


def _segment_peaks(
    simulated: SimulatedRank, size: RunSize, count: int, *, offloads: bool
) -> dict[Any, MemoryPeak]:
    """Return the peak of each segment of a step that computes only `count` micro batches."""
    recipe, step, plan = simulated
    left = size.micro_batches - count
    tracker = track(
        step,
        plan.take,
        recipe.data,
        recipe.model.layout.blocks,
        ema=recipe.ema,
        offloads=offloads and recipe.parallel.fsdp.offload,
        owns_gradient_buffers=plan.degrees.dp_cp > 1 and plan.mesh is None,
        left=left * size.rows,
    )
    more = tracker.live(RECEIVED) * left // count
    return {
        segment: MemoryPeak(peak.total + more, peak.kinds + Counter({RECEIVED: more}))
        for segment, peak in tracker.peaks().items()
    }


def _gathered_bytes(simulated: SimulatedRank) -> int:
    recipe, step, plan = simulated
    degrees, model = plan.degrees, step.parallel_model.model
    if not recipe.parallel.uses_fsdp(degrees):
        return 0
    layout = recipe.model.layout
    sharded = degrees.fsdp if recipe.parallel.is_sharded(degrees) else 1
    _, expert_ranks = expert_grid(degrees, sharded=sharded > 1)

    def gathered(block: nn.Module) -> int:
        """Return the elements of a block's weights, of which a rank holds its shards."""
        return sum(
            local(weight).numel() * (expert_ranks if layout.is_expert(f".{name}") else sharded)
            for name, weight in block.named_parameters()
        )

    # A model without blocks is one unit of FSDP.
    largest = max(map(gathered, layout.find_blocks(model) or [model]))
    width = model.compute_dtype.itemsize + DTYPES[recipe.precision.reduce].itemsize
    return largest * width


def _extend(
    longer: Mapping[Any, MemoryPeak], shorter: Mapping[Any, MemoryPeak], steps: int
) -> Iterator[MemoryPeak]:
    """Extrapolate the peaks of segments to a run with more blocks.

    In a segment at a fixed distance from the start or end of a stage, each further block adds the
    same number of bytes. So the peak of such a segment is linear in the number of blocks, and the
    largest is the peak of the run. A segment between the ends never exceeds both ends.

    Args:
        longer: the peaks of a run by segment.
        shorter: the peaks of a run with one block less in each stage.
        steps: the number of blocks to add to each stage of the longer run.
    """
    before = _by_name(shorter)
    for name, peak in _by_name(longer).items():
        yield MemoryPeak(
            peak.total + steps * (peak.total - before[name].total),
            extrapolate_counts(before[name].kinds, peak.kinds, (0, 1), 1 + steps),
        )


def _by_name(peaks: Mapping[Any, MemoryPeak]) -> dict[Hashable, MemoryPeak]:
    return {
        name: peak
        for segment, peak in peaks.items()
        for name in (segment.names() if isinstance(segment, BlockSegment) else (segment,))
    }


def count_ranks(
    recipe: Recipe,
    ranks: int,
    vocab_size: int,
    *,
    on_gpu: bool,
    places: Iterable[int] | None = None,
    whole: bool = False,
) -> Iterator[StepCounts]:
    """Yield the counts of a step on the first rank of each pipeline coordinate.

    Args:
        recipe: the recipe, validated for that many ranks.
        ranks: the world size.
        vocab_size: the tokenizer's vocabulary size.
        on_gpu: compute as a GPU would; see `simulate_rank`.
        places: the coordinates on the pipeline axis; None: all.
        whole: simulate all blocks and micro batches.
    """
    recipe = recipe.model_copy(update={"metrics": Metrics()})  # no step that monitors measure
    # A frozen model from elsewhere does not become smaller with the model that is trained.
    whole = whole or bool(recipe.task.frozen_model(recipe.loss))
    size = size_of(recipe, ranks, vocab_size)
    optimizer = recipe.optimizer.for_gpu() if on_gpu else recipe.optimizer
    found = placements(recipe, size.degrees, vocab_size) if optimizer.needs_matrices else []
    update: Callable[[int], StepCounts] | None = None
    if found and not (whole or recipe.lora.rank):
        # The optimizer is counted apart, and AdamW sends nothing. The forward pass stays the same.
        config, table = recipe.model.with_vocab(vocab_size), recipe.parallel
        update = partial(count_update, optimizer, config, table, found, size.degrees)
        stand_in = ScoringAdamW() if optimizer.bounds_scores else AdamW()
        recipe = recipe.model_copy(update={"optimizer": stand_in})
    whole = whole or recipe.optimizer.needs_matrices
    own = size.degrees.pipeline, (), ()
    pipeline, blocks, counts = own if whole else smallest_sizes(recipe, size, vocab_size)
    last, inner = size.degrees.pipeline - 1, ranks // size.degrees.pipeline

    @cache
    def simulate(place: int, num_blocks: int, micro_batches: int) -> StepCounts:
        stages = [num_blocks] * (size.stages_per_rank * pipeline) if num_blocks else []
        small = resize(recipe, size, pipeline=pipeline, blocks=stages, micro_batches=micro_batches)
        rank = place * inner
        with simulate_rank(small, rank, pipeline * inner, vocab_size, on_gpu=on_gpu) as simulated:
            return _count(simulated, rank)

    for place in range(size.degrees.pipeline) if places is None else places:
        near = place if pipeline > last else {0: 0, last: pipeline - 1}.get(place, 1)
        rows = []
        for b in blocks or (0,):
            samples = [simulate(near, b, m) for m in counts or (0,)]
            rows.append(_extend_counts(samples, counts, size.micro_batches))
        num_blocks = sum(size.blocks[stage] for stage in size.stages_of(place))
        total = _extend_counts(rows, [size.stages_per_rank * b for b in blocks], num_blocks)
        yield total.with_update(update(place * inner)) if update else total


def smallest_sizes(
    recipe: Recipe, size: RunSize, vocab_size: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the pipeline ranks of the short runs, and their numbers of blocks of a stage and of
    micro batches; an empty tuple stands for the run's own.
    """
    table, stages = recipe.parallel.pipelining, len(size.stage_to_rank)
    pipeline = size.degrees.pipeline
    blocks: tuple[int, ...] = ()
    if table.csv:
        return pipeline, (), ()
    if sum(size.blocks) > 2 * stages:
        short = [resize(recipe, size, blocks=[n] * stages) for n in (1, 2)]
        if have_identical_blocks([recipe, *short], size.degrees, vocab_size):
            blocks = (1, 2)
    if size.stages_per_rank > MOST_STAGES:
        return pipeline, blocks, ()
    if blocks:
        pipeline = min(pipeline, SMALL_PIPELINE)
    least = pipeline * (size.stages_per_rank if table.schedule == "DualPipeV" else 1)
    return pipeline, blocks, (least, 2 * least) if size.micro_batches > 2 * least else ()


def _count(simulated: SimulatedRank, rank: int) -> StepCounts:
    recipe, step, plan = simulated
    counts = count_step(step, step_batches(recipe.data, step, plan), rank)
    if plan.mesh is None and plan.degrees.dp_cp > 1:
        # A simulation has no DDP: add its all-reduce of the gradients.
        width = torch.bfloat16.itemsize if recipe.precision.reduce == "bf16" else None
        gradients = (w for w in step.parallel_model.model.parameters() if w.requires_grad)
        reduced = sum(w.numel() * (width or max(4, w.itemsize)) for w in gradients)
        axes = tuple(axis for axis, degree in plan.degrees.by_axis.items() if degree > 1)
        counts.message_bytes[Route(axes, ALL_REDUCE)] += reduced
        counts.calls[Route(axes, ALL_REDUCE)] += -(-reduced // DDP_BUCKET)
    return counts


def _extend_counts(samples: Sequence[StepCounts], xs: Sequence[int], x: int) -> StepCounts:
    """Return the counts at `x` of lines through those at two `xs`; the only ones without `xs`."""
    if not xs:
        return samples[0]
    low, high = (vars(sample) for sample in samples)
    return StepCounts(**{name: extrapolate_counts(low[name], high[name], xs, x) for name in low})
