"""Where a pipeline is cut. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from .schedule_file import read_schedule

if TYPE_CHECKING:
    from ....model_zoo.config import ModelConfig
    from ..tables import Pipelining

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
        holders: rank of each stage.
        is_tied: the last stage needs the embedding's weight too.
    """

    ranks: int
    ends: tuple[int, ...]
    holders: tuple[int, ...]
    is_tied: bool = False

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.ends)

    def blocks(self, stage: int) -> range:
        """Return the numbers of a stage's blocks."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def rank_of(self, stage: int) -> int:
        """Return who holds a stage."""
        return self.holders[stage]

    def stages_of(self, rank: int) -> list[int]:
        """Return a rank's stages, in order."""
        return [stage for stage, holder in enumerate(self.holders) if holder == rank]

    def has_embedding(self, stage: int) -> bool:
        """Return whether a stage computes with the embedding's weight."""
        return stage == 0 or (self.is_tied and stage == self.stages - 1)

    def other_end(self, rank: int) -> int | None:
        """Return which other rank holds the same weight as this one, if one does."""
        ends = {self.holders[0], self.holders[-1]} if self.is_tied else set[int]()
        return next(iter(ends - {rank}), None) if rank in ends else None


@dataclass(frozen=True)
class EndCosts:
    """What the ends of a model cost, forward and backward, where a block costs 1."""

    embedding: float
    head: float


def cut_blocks(
    table: Pipelining, ranks: int, config: ModelConfig, costs: EndCosts | None = None
) -> Cut:
    """Return where a recipe cuts a model.

    Args:
        table: `[parallel.pipelining]`.
        ranks: of a pipeline.
        config: the model's.
        costs: by which the stages are balanced; None: estimated.

    Raises:
        ScheduleFault: there is a schedule file, and it is none.
    """
    blocks: int = config.n_layers  # type: ignore[attr-defined]
    costs = costs or EndCosts(config.embed_cost, config.head_cost)
    holders = stage_holders(table, ranks)
    if table.modules_per_stage:
        ends = {config.layout.embed, config.layout.head}
        sizes = [len(set(names) - ends) for names in table.modules_per_stage]
        cut = tuple(accumulate(sizes))
    elif table.layers_per_stage:
        cut = tuple(accumulate(table.layers_per_stage))
    else:
        cut = balanced(blocks, len(holders), costs.embedding, costs.head)
    return Cut(ranks, cut, holders, bool(getattr(config, "tie_embeddings", False)))


def stage_costs(cut: Cut, config: ModelConfig) -> list[float]:
    """Return what each stage costs by estimate, where a block costs 1."""
    costs = [float(len(cut.blocks(stage))) for stage in range(cut.stages)]
    costs[0] += config.embed_cost
    costs[-1] += config.head_cost
    return costs


def stage_holders(table: Pipelining, ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    Raises:
        ScheduleFault: there is a schedule file, and it is none.
    """
    if table.csv:
        return read_schedule(Path(table.csv)).holders
    # There and back again, or round and round.
    turn = [*range(ranks), *reversed(range(ranks))] if table.schedule in V_SHAPED else range(ranks)
    return tuple(islice(cycle(turn), num_stages(table, ranks)))


def num_stages(table: Pipelining, ranks: int) -> int:
    """Return how many stages a pipeline has whose schedule is a named one."""
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

    Of the cuts that are, the one whose stages differ least is taken. Each stage has a block.

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
