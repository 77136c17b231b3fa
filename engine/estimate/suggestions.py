"""Which changes of a recipe save how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import RecipeError
from .memory import Estimate, RankJob, simulate_all

if TYPE_CHECKING:
    from ..parallel.mesh import Degrees
    from ..recipe.schema import Recipe


@dataclass(frozen=True)
class Suggestion:
    """A change of a recipe, and the memory that it saves on the rank that needs most.

    Attributes:
        changes: KEY=VALUE, as for `--set`.
        world: the world size.
        saved_bytes: the bytes of tensors at the peak that are saved.
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
    """Return the changes that save memory, the best first; each is simulated on one rank.

    Args:
        recipe: the recipe as estimated.
        estimates: the memory of each place in the pipeline.
        world: the world size.
        load: returns the recipe, validated, with changes and for a number of ranks.
    """
    worst = max(estimates, key=lambda estimate: estimate.peak_bytes)
    place = estimates.index(worst)
    jobs, accepted = [], []
    for changes, ranks in _changes(recipe, recipe.parallel.degrees.resolve(world)):
        try:
            changed = load(changes, ranks)
        except RecipeError:
            continue
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
    """Yield changes that may save memory and a world size for each; some may be invalid."""
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
