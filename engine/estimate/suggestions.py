"""Which changes of a recipe save how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import RecipeError
from ..recipe.checks.checks import known_degrees
from .memory import Estimate, simulate_all

if TYPE_CHECKING:
    from ..parallel.mesh import Degrees
    from ..recipe.schema import Recipe


@dataclass(frozen=True)
class Knob:
    """A change, and what the rank that needed most would then need less.

    Attributes:
        changes: KEY=VALUE, as for `--set`.
        world: number of ranks.
        saved_bytes: of tensors at the peak.
    """

    changes: Sequence[str]
    world: int
    saved_bytes: int


def best_knobs(
    recipe: Recipe,
    found: Sequence[Estimate],
    world: int,
    load: Callable[[Sequence[str], int], Recipe],
) -> list[Knob]:
    """Return the changes that save memory, the best first; each is simulated on one rank.

    Args:
        recipe: as estimated.
        found: what its ranks need.
        world: how many there are.
        load: returns the recipe, validated, with changes and for a number of ranks.
    """
    worst = max(found, key=lambda each: each.peak_bytes)
    place = found.index(worst)
    jobs, tried = [], []
    for changes, ranks in _changes(recipe, world):
        try:
            changed = load(changes, ranks)
        except RecipeError:
            continue
        stages = known_degrees(changed, ranks).known.pipeline
        rank = min(place, stages - 1) * (ranks // stages)
        jobs.append((changed, rank, ranks, changed.vocab_size, True))
        tried.append((changes, ranks))
    knobs = [
        Knob(changes, ranks, worst.peak_bytes - each.peak_bytes)
        for (changes, ranks), each in zip(tried, simulate_all(jobs), strict=True)
    ]
    saving = [knob for knob in knobs if knob.saved_bytes > 0]
    return sorted(saving, key=lambda knob: -knob.saved_bytes)


def _changes(recipe: Recipe, world: int) -> Iterator[tuple[list[str], int]]:
    """Yield what may save memory, each with a number of ranks; some of it may not be valid."""
    degrees = known_degrees(recipe, world)
    modes = ("none", "selective", "full")
    now = recipe.memory.recompute
    for mode in modes[modes.index(now) + 1 :] if now in modes else ("full",):
        yield [f"memory.recompute={mode}"], world
    if recipe.data.micro_batch > 1:
        yield [f"data.micro_batch={recipe.data.micro_batch // 2}"], world
    if not recipe.memory.optimizer_in_backward:
        yield ["memory.optimizer_in_backward=true", "optimizer.clip_norm=0"], world
    yield from _sharding(recipe, degrees, world)
    for axis in ("tensor", "pipeline"):
        for other in ("shard", "replicate"):
            if getattr(degrees, other) % 2 == 0:
                halved = f"parallel.{other}={getattr(degrees, other) // 2}"
                yield [f"parallel.{axis}={2 * getattr(degrees, axis)}", halved], world
                break


def _sharding(recipe: Recipe, degrees: Degrees, world: int) -> Iterator[tuple[list[str], int]]:
    fsdp, copies = recipe.parallel.fsdp, degrees.data
    if degrees.dp_cp > 1:
        if fsdp.strategy in ("shard_grad_op", "no_shard"):
            yield ["parallel.fsdp.strategy=full_shard"], world
        if fsdp.reduce_every == "step":
            yield ["parallel.fsdp.reduce_every=micro_batch"], world
        if degrees.replicate > 1:
            change = ["parallel.replicate=1", f"parallel.shard={copies}"]
            yield [*change, "parallel.fsdp.strategy=full_shard"], world
        if not fsdp.offload:
            yield ["parallel.fsdp.offload=true"], world
    yield [f"parallel.shard={2 * degrees.shard}"], 2 * world
