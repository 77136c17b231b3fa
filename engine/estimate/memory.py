"""Estimates the peak memory of each pipeline coordinate, and suggests changes that save memory.

Only the processes that simulate ranks import torch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import EnvironmentFault, RecipeError
from ..parallel.pipeline.cut import cut_blocks
from .devices import overhead

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ..parallel.mesh import Degrees
    from ..parallel.tables import Pipelining
    from ..recipe.schema import Recipe
    from .simulate.extrapolate import Simulation


PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._dynamo.utils",
    f"{__package__}.simulate.extrapolate",
]


class RankJob(NamedTuple):
    """The simulation of one rank; see `simulate_memory` for the fields."""

    recipe: Recipe
    rank: int
    ranks: int
    vocab_size: int
    on_gpu: bool


@dataclass(frozen=True)
class Estimate:
    """The memory that a rank needs.

    Attributes:
        rank: the first of the ranks that need the same memory.
        peak_bytes: the largest sum of live tensors on the device; offloaded tensors do not count.
        at_peak: the bytes of each kind of tensor at the peak.
        margins: bytes outside of tensors by name, see `devices.overhead`; empty without a GPU.
    """

    rank: int
    peak_bytes: int
    at_peak: dict[str, int]
    margins: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum of the peak and the margins."""
        return self.peak_bytes + sum(self.margins.values())

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def estimate_memory(
    recipe: Recipe, ranks: int, *, on_gpu: bool = True, gpu: str = "h100"
) -> list[Estimate]:
    """Return the peak memory of the first rank of each pipeline coordinate.

    Ranks along the other axes need the same, up to one row of an unevenly sharded weight.

    Args:
        recipe: the recipe, validated for that many ranks.
        ranks: the world size.
        on_gpu: True to simulate a GPU's implementations and add `devices.overhead`.
        gpu: a name of `GPU_MIB`.

    Raises:
        RecipeError, DataError: as when the run is assembled.
        EnvironmentFault: a process that simulates was killed.
    """
    recipe = recipe.for_largest_split()
    degrees = recipe.parallel.degrees.resolve(ranks)
    whole = RankJob(recipe, 0, ranks, recipe.vocab_size, on_gpu)
    simulations = (
        [_simulate(whole)] if degrees.pipeline == 1 else _simulate_pipeline(whole, degrees)
    )
    along = [degree for axis, degree in degrees.by_axis.items() if axis != "shard"]
    communicators = sum(size > 1 for size in (ranks, degrees.fsdp, *along))
    return [
        Estimate(
            one.rank,
            one.peak_bytes,
            one.at_peak,
            overhead(one.peak_bytes, communicators, one.block_bytes, gpu) if on_gpu else {},
        )
        for one in simulations
    ]


def describe_row_lengths(recipe: Recipe) -> str:
    """Return how rows of unequal lengths are counted; empty if rows have one length."""
    if recipe.data.packing != "ragged":
        return ""
    if not recipe.task.needs_language_model:
        return "samples are ragged: each is counted as long as the first one"
    return f"rows are ragged: each is counted as {recipe.data.seq_len} tokens, an upper bound"


def _simulate_pipeline(job: RankJob, degrees: Degrees) -> list[Simulation]:
    """Simulate the first rank of each pipeline coordinate, and interpolate where that is exact.

    Under 1F1B, inner stages with equally many blocks differ only in the number of micro batches in
    flight. The peak is a maximum of linear functions of that number, so it is convex: if the second
    such stage lies on the line from the first to the last, the stages between do too.
    """
    stages, size = degrees.pipeline, degrees.world // degrees.pipeline

    def simulate(places: Sequence[int]) -> dict[int, Simulation]:
        jobs = [job._replace(rank=place * size) for place in places]
        return dict(zip(places, simulate_all(jobs), strict=True))

    config = job.recipe.model.with_vocab(job.vocab_size)
    equal = list(_equal_stages(job.recipe.parallel.pipelining, stages, config))
    skipped = {place for first, last in equal for place in range(first + 2, last)}
    by_place = simulate([place for place in range(stages) if place not in skipped])
    for first, last in equal:
        rest = range(first + 2, last)
        line = line_through(by_place[first], by_place[first + 1], by_place[last], last - first)
        by_place |= {p: line(p - first, p * size) for p in rest} if line else simulate(rest)
    return [by_place[place] for place in range(stages)]


def simulate_all(jobs: Sequence[RankJob]) -> list[Simulation]:
    """Simulate several ranks, each in its own process, because process groups are global in torch.

    Raises:
        RecipeError: as when the run is assembled.
        EnvironmentFault: a process that simulates was killed.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    workers = max(1, min(len(os.sched_getaffinity(0)), len(jobs)))
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        try:
            return list(pool.map(_simulate, jobs))
        except BrokenProcessPool as error:
            raise EnvironmentFault("a simulation was killed", "is memory short?") from error


def _simulate(job: RankJob) -> Simulation:
    # Imported here because it imports torch, which the parent of several simulations does not need.
    from .simulate.extrapolate import simulate_memory

    return simulate_memory(*job[:-1], on_gpu=job.on_gpu)


def _equal_stages(table: Pipelining, stages: int, config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield the first and last of four or more consecutive inner stages of equal block count."""
    if table.schedule != "1F1B":
        return
    cut = cut_blocks(table, stages, config)
    places: dict[int, list[int]] = defaultdict(list)
    for place in range(1, stages - 1):
        places[len(cut.held_blocks(place))].append(place)
    for equal in places.values():
        if len(equal) > 3 and equal[-1] - equal[0] == len(equal) - 1:
            yield equal[0], equal[-1]


def line_through(
    first: Simulation, second: Simulation, last: Simulation, steps: int
) -> Callable[[int, int], Simulation] | None:
    """Return a function that interpolates between the simulations of two pipeline stages.

    Args:
        first: the simulation of the first of several stages.
        second: the simulation of the stage after it.
        last: the simulation of the last of these stages.
        steps: the number of stages from `first` to `last`.

    Returns:
        A function from the number of stages after `first` and a rank to a simulation, or None if
        the peak of `second` does not lie on the line from `first` to `last`.
    """
    if (second.peak_bytes - first.peak_bytes) * steps != last.peak_bytes - first.peak_bytes:
        return None

    def interpolate(step: int, rank: int) -> Simulation:
        low, high = first.at_peak, second.at_peak
        kinds = {
            kind: low.get(kind, 0) + step * (high.get(kind, 0) - low.get(kind, 0))
            for kind in {**low, **high}
        }
        return replace(first, rank=rank, peak_bytes=sum(kinds.values()), at_peak=kinds)

    return interpolate


@dataclass(frozen=True)
class Suggestion:
    """A change of a recipe, and the memory that it saves on the rank with the highest peak.

    Attributes:
        changes: KEY=VALUE, as for `--set`.
        world: the world size with the change.
        saved_bytes: the decrease of the peak of tensors in bytes.
    """

    changes: Sequence[str]
    world: int
    saved_bytes: int


def suggest(
    recipe: Recipe,
    estimates: Sequence[Estimate],
    world: int,
    load: Callable[[Sequence[str], int], Recipe],
) -> list[Suggestion]:
    """Return the changes that save memory, the largest saving first; each is simulated on one rank.

    Args:
        recipe: the recipe as estimated.
        estimates: the estimate of each pipeline coordinate.
        world: the world size.
        load: returns the recipe with the changes applied, validated for a world size.
    """
    worst = max(estimates, key=lambda estimate: estimate.peak_bytes)
    place = estimates.index(worst)
    jobs, accepted = [], []
    for changes, ranks in _changes(recipe, recipe.parallel.degrees.resolve(world)):
        try:
            changed = load(changes, ranks)
        except RecipeError:
            continue
        changed = changed.for_largest_split()
        stages = changed.parallel.degrees.resolve(ranks).pipeline
        rank = min(place, stages - 1) * (ranks // stages)
        jobs.append(RankJob(changed, rank, ranks, changed.vocab_size, on_gpu=True))
        accepted.append((changes, ranks))
    suggestions = [
        Suggestion(changes, ranks, worst.peak_bytes - simulation.peak_bytes)
        for (changes, ranks), simulation in zip(accepted, simulate_all(jobs), strict=True)
    ]
    saving = [suggestion for suggestion in suggestions if suggestion.saved_bytes > 0]
    return sorted(saving, key=lambda suggestion: -suggestion.saved_bytes)


def _changes(recipe: Recipe, degrees: Degrees) -> Iterator[tuple[list[str], int]]:
    """Yield changes that may save memory, each with a world size; some are invalid recipes."""
    world, fsdp = degrees.world, recipe.parallel.fsdp
    modes = ("none", "selective", "full")
    mode = recipe.memory.recompute
    for more in modes[modes.index(mode) + 1 :] if mode in modes else ("full",):
        yield [f"memory.recompute={more}"], world
    if recipe.data.micro_batch > 1:
        yield [f"data.micro_batch={recipe.data.micro_batch // 2}"], world
    if not recipe.memory.optimizer_in_backward:
        yield ["memory.optimizer_in_backward=true", "optimizer.clip_norm=0"], world
    if degrees.dp_cp > 1:
        sharding = fsdp.sharding
        is_wider = not sharding.shards or not sharding.reshard_after_forward
        if is_wider and not sharding.needs_replicas:
            yield ["parallel.fsdp.strategy=full_shard"], world
        if fsdp.reshard_after_forward:
            yield ["parallel.fsdp.reshard_after_forward=0"], world
        if fsdp.reduce_every == "step":
            yield ["parallel.fsdp.reduce_every=micro_batch"], world
        if degrees.replicate > 1:
            change = ["parallel.replicate=1", f"parallel.shard={degrees.data}"]
            yield [*change, "parallel.fsdp.strategy=full_shard"], world
        if not fsdp.offload:
            yield ["parallel.fsdp.offload=true"], world
    yield [f"parallel.shard={2 * degrees.shard}"], 2 * world
    for axis in ("tensor", "pipeline"):
        for other in ("shard", "replicate"):
            if getattr(degrees, other) % 2 == 0:
                halved = f"parallel.{other}={getattr(degrees, other) // 2}"
                yield [f"parallel.{axis}={2 * getattr(degrees, axis)}", halved], world
                break
