"""Where a pipeline is cut. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ..recipe.tables import Pipelining

ONE_STAGE_A_RANK = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""the first rank holds the first and the last stage: there and back again"""


SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
"""gradients of inputs and of weights are computed apart"""


@dataclass(frozen=True)
class Cut:
    """Consecutive blocks become stages, and each rank of a pipeline holds some stages.

    Args:
        ranks: of a pipeline.
        ends: number of the block after each stage.
        is_v: the order of stages on ranks is 0, 1, ..., 1, 0 instead of 0, 1, ..., 0, 1, ...
    """

    ranks: int
    ends: tuple[int, ...]
    is_v: bool = False

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.ends)

    def blocks(self, stage: int) -> range:
        """Return the numbers of a stage's blocks."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def rank_of(self, stage: int) -> int:
        """Return who holds a stage."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.is_v and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return a rank's stages, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


def cut_blocks(table: Pipelining, ranks: int, config: ModelConfig) -> Cut:
    """Return where a recipe cuts a model.

    Args:
        table: `[parallel.pipelining]`.
        ranks: of a pipeline.
        config: the model's.
    """
    blocks: int = config.n_layers  # type: ignore[attr-defined]
    stages = num_stages(table, ranks)
    if table.layers_per_stage:
        ends = tuple(accumulate(table.layers_per_stage))
    else:
        ends = balanced(blocks, stages, 0.0, config.head_cost)
    return Cut(ranks, ends, table.schedule in V_SHAPED)


def num_stages(table: Pipelining, ranks: int) -> int:
    """Return how many stages a pipeline has."""
    return ranks * (table.stages_per_rank or (1 if table.schedule in ONE_STAGE_A_RANK else 2))


def num_micro_batches(table: Pipelining, micro_batch: int, rows: int) -> int:
    """Return into how many micro batches a rank's rows of a step are cut.

    Args:
        table: `[parallel.pipelining]`.
        micro_batch: rows each, where the table does not say how many.
        rows: of a rank in a step.
    """
    return table.micro_batches or rows // min(micro_batch, rows)


def balanced(blocks: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Return the ends of stages so that the most expensive one is as cheap as possible.

    Of the cuts that are, the one whose stages differ least is taken.

    Args:
        blocks: how many there are, of cost 1 each.
        stages: at most as many as blocks.
        first: cost of what stands before the blocks.
        last: cost of what stands after them.
    """
    # best[n]: the cheapest way to give the first n blocks to the stages so far, and its ends.
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for stage in range(stages):
        extra = first * (stage == 0) + last * (stage == stages - 1)
        following: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for start, ((worst, squares), ends) in best.items():
            for end in range(start + 1, blocks - (stages - stage - 1) + 1):
                cost = end - start + extra
                found = ((max(worst, cost), squares + cost * cost), (*ends, end))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return best[blocks][1]
