"""Peak memory of every rank that differs from the others. Torch is loaded where ranks are
simulated.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ..core.errors import EnvironmentFault
from ..recipe.checks.checks import known_degrees
from .devices import margins

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from .simulate.simulate import Simulation

PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._dynamo.utils",
    f"{__package__}.simulate.simulate",
]


@dataclass(frozen=True)
class Estimate:
    """What a rank needs.

    Attributes:
        rank: the first of those that need the same.
        peak_bytes: most that tensors hold at a moment, what is offloaded left out.
        at_peak: bytes then, by kind.
        margins: bytes that no simulation sees, by name; empty where no GPU is meant.
    """

    rank: int
    peak_bytes: int
    at_peak: dict[str, int]
    margins: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.peak_bytes + sum(self.margins.values())

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def estimate_memory(
    recipe: Recipe, ranks: int, *, on_gpu: bool = True, gpu: str = "h100"
) -> list[Estimate]:
    """Return the peak memory of the first rank of each place in the pipeline.

    Ranks along the other axes hold the same, up to a row of an uneven weight.

    Args:
        recipe: validated for that many ranks.
        ranks: of the run.
        on_gpu: compute as a GPU would, and add what it holds besides tensors.
        gpu: which, a name of `GPU_MIB`.

    Raises:
        RecipeError, DataError: as when the run is assembled.
        EnvironmentFault: a simulation was killed.
    """
    vocab_size = recipe.vocab_size
    degrees = known_degrees(recipe, ranks)
    stages = degrees.pipeline
    if stages == 1:
        found = [_simulate(recipe, 0, ranks, vocab_size, on_gpu)]
    else:
        found = list(_pipeline(recipe, stages, ranks, vocab_size, on_gpu))
    communicators = sum(
        size > 1
        for size in (
            ranks,
            degrees.fsdp,
            *(degree for axis, degree in degrees.by_axis.items() if axis != "shard"),
        )
    )

    def more(each: Simulation) -> dict[str, int]:
        return margins(each.peak_bytes, communicators, each.block_bytes, gpu) if on_gpu else {}

    return [Estimate(each.rank, each.peak_bytes, each.at_peak, more(each)) for each in found]


def _pipeline(
    recipe: Recipe, stages: int, ranks: int, vocab_size: int, on_gpu: bool
) -> Iterator[Simulation]:
    """Yield what the first rank of each place needs.

    Under 1F1B, stages between the ends that have as many blocks differ in how many micro batches
    they hold alone. A peak is the highest of straight lines in that number; if the second of such
    stages is on the line from the first to the last, all are.
    """
    size = ranks // stages

    def simulated(places: Sequence[int]) -> dict[int, Simulation]:
        jobs = [(recipe, place * size, ranks, vocab_size, on_gpu) for place in places]
        return dict(zip(places, simulate_all(jobs), strict=True))

    between = list(_between(recipe, stages, vocab_size))
    skipped = {place for first, last in between for place in range(first + 2, last)}
    found = simulated([place for place in range(stages) if place not in skipped])
    for first, last in between:
        rest = range(first + 2, last)
        line = _on_a_line(found[first], found[first + 1], found[last], last - first)
        found |= {p: line(p - first, p * size) for p in rest} if line else simulated(rest)
    for place in range(stages):
        yield found[place]


Job = tuple["Recipe", int, int, int, bool]
"""recipe, rank, ranks, size of the vocabulary, whether as on a GPU"""


def simulate_all(jobs: Sequence[Job]) -> list[Simulation]:
    """Simulate several ranks, each in a process of its own: torch remembers the groups of a rank.

    Raises:
        RecipeError: as when the run is assembled.
        EnvironmentFault: a simulation was killed.
    """
    from concurrent.futures.process import BrokenProcessPool

    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    workers = max(1, min(len(os.sched_getaffinity(0)), len(jobs)))
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(_simulate, *job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise EnvironmentFault("a simulation was killed", "is memory short?") from error


def _between(recipe: Recipe, stages: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of four or more stages that are alike."""
    from ..parallel.pipeline.cut import cut_blocks

    table = recipe.parallel.pipelining
    if table.schedule != "1F1B":
        return
    cut = cut_blocks(table, stages, recipe.model.with_vocab(vocab_size))
    places: dict[int, list[int]] = defaultdict(list)
    for place in range(1, stages - 1):
        places[len(cut.blocks(place))].append(place)
    for alike in places.values():
        if len(alike) > 3 and alike[-1] - alike[0] == len(alike) - 1:
            yield alike[0], alike[-1]


def _on_a_line(first: Simulation, second: Simulation, last: Simulation, steps: int) -> Any:
    """Return what gives the simulations between the first and the last, or None if no line does."""
    if (second.peak_bytes - first.peak_bytes) * steps != last.peak_bytes - first.peak_bytes:
        return None

    def at(step: int, rank: int) -> Simulation:
        kinds = {
            kind: first.at_peak.get(kind, 0)
            + step * (second.at_peak.get(kind, 0) - first.at_peak.get(kind, 0))
            for kind in {**first.at_peak, **second.at_peak}
        }
        return replace(first, rank=rank, peak_bytes=sum(kinds.values()), at_peak=kinds)

    return at


def _simulate(recipe: Recipe, rank: int, ranks: int, vocab_size: int, on_gpu: bool) -> Simulation:
    from .simulate.simulate import simulate

    return simulate(recipe, rank, ranks, vocab_size, on_gpu=on_gpu)
