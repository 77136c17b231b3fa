"""Peak memory of every rank that differs from the others. Torch is loaded where ranks are
simulated.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from ..errors import EnvironmentFault
from ..recipe.checks import known_degrees

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from .simulate import Simulation

GPU_MIB = {
    "a100-40": 40_960,
    "a100": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
    "l40s": 46_068,
    "rtx4090": 24_564,
}
"""memory as nvidia-smi shows it"""


def estimate_memory(recipe: Recipe, ranks: int, *, on_gpu: bool = True) -> list[Simulation]:
    """Return the peak memory of the first rank of each place in the pipeline.

    Ranks along the other axes hold the same, up to a row of an uneven weight.

    Args:
        recipe: validated for that many ranks.
        ranks: of the run.
        on_gpu: compute as a GPU would.

    Raises:
        RecipeError, DataError: as when the run is assembled.
        EnvironmentFault: a simulation was killed.
    """
    from concurrent.futures.process import BrokenProcessPool

    stages = known_degrees(recipe, ranks).get("pipeline", 1)
    vocab_size = getattr(recipe.model, "vocab_size", None) or recipe.tokenizer.build().vocab_size
    firsts = [place * (ranks // stages) for place in range(stages)]
    if len(firsts) == 1:
        return [_simulate(recipe, 0, ranks, vocab_size, on_gpu)]
    workers = min(len(os.sched_getaffinity(0)), len(firsts))
    # A new process for each: torch remembers the groups of a rank.
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = [
            pool.submit(_simulate, recipe, first, ranks, vocab_size, on_gpu) for first in firsts
        ]
        try:
            return [job.result() for job in jobs]
        except BrokenProcessPool as error:
            raise EnvironmentFault("a simulation was killed", "is memory short?") from error


def _simulate(recipe: Recipe, rank: int, ranks: int, vocab_size: int, on_gpu: bool) -> Simulation:
    from .simulate import simulate

    return simulate(recipe, rank, ranks, vocab_size, on_gpu=on_gpu)
