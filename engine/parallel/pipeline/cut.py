"""How the blocks of a model are divided into the stages of a pipeline. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from .schedule_file import read_schedule

if TYPE_CHECKING:
    from ....model_zoo.config import ModelConfig
    from ..tables import Pipelining

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""schedules in V order: stages go to the ranks forwards and then backwards, so that the first rank
holds the first and the last stage"""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SCHEDULES)
"""schedules that compute gradients of inputs and of weights apart"""


@dataclass(frozen=True)
class StageSplit:
    """The division of a model's blocks into stages, and of stages among the ranks of a pipeline.

    Attributes:
        ranks: number of ranks of the pipeline.
        ends: for each stage, the number of the first block after it.
        stage_to_rank: the rank that holds each stage.
        is_tied: whether the last stage needs the embedding's weight too.
    """

    ranks: int
    ends: tuple[int, ...]
    stage_to_rank: tuple[int, ...]
    is_tied: bool = False

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ends)

    def blocks(self, stage: int) -> range:
        """Return the numbers of a stage's blocks."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return self.stage_to_rank[stage]

    def stages_of(self, rank: int) -> list[int]:
        """Return a rank's stages, in order."""
        return [stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank]

    def has_embedding(self, stage: int) -> bool:
        """Return whether a stage computes with the embedding's weight."""
        return stage == 0 or (self.is_tied and stage == self.stages - 1)

    def other_end(self, rank: int) -> int | None:
        """Return the rank at the other end that holds a copy of a tied embedding, if any."""
        ends = {self.stage_to_rank[0], self.stage_to_rank[-1]} if self.is_tied else set[int]()
        return next(iter(ends - {rank}), None) if rank in ends else None


@dataclass(frozen=True)
class EndCosts:
    """Time of the forward and backward passes of a model's ends, where a block takes 1."""

    embedding: float
    head: float


def cut_blocks(
    table: Pipelining, ranks: int, config: ModelConfig, costs: EndCosts | None = None
) -> StageSplit:
    """Return the stages that a recipe divides a model into.

    Args:
        table: `[parallel.pipelining]`.
        ranks: of a pipeline.
        config: the model's.
        costs: by which the stages are balance_stages; None: estimated.

    Raises:
        ScheduleFault: there is a schedule file, and it is none.
    """
    blocks: int = config.n_layers  # type: ignore[attr-defined]
    costs = costs or EndCosts(config.embed_cost, config.head_cost)
    stage_to_rank = assign_stages(table, ranks)
    if table.modules_per_stage:
        ends = {config.layout.embed, config.layout.head}
        sizes = [len(set(names) - ends) for names in table.modules_per_stage]
        cut = tuple(accumulate(sizes))
    elif table.layers_per_stage:
        cut = tuple(accumulate(table.layers_per_stage))
    else:
        cut = balance_stages(blocks, len(stage_to_rank), costs.embedding, costs.head)
    return StageSplit(ranks, cut, stage_to_rank, bool(getattr(config, "tie_embeddings", False)))


def stage_costs(cut: StageSplit, config: ModelConfig) -> list[float]:
    """Return the estimated cost of each stage, where a block costs 1."""
    costs = [float(len(cut.blocks(stage))) for stage in range(cut.stages)]
    costs[0] += config.embed_cost
    costs[-1] += config.head_cost
    return costs


def assign_stages(table: Pipelining, ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    Raises:
        ScheduleFault: there is a schedule file, and it is none.
    """
    if table.csv:
        return read_schedule(Path(table.csv)).stage_to_rank
    order = list(range(ranks))
    if table.schedule in V_SCHEDULES:
        order += reversed(order[:])
    return tuple(islice(cycle(order), num_stages(table, ranks)))


def num_stages(table: Pipelining, ranks: int) -> int:
    """Return the number of stages of a pipeline under one of torch's schedules."""
    return ranks * (table.stages_per_rank or (1 if table.schedule in SINGLE_STAGE_SCHEDULES else 2))


def num_micro_batches(table: Pipelining, micro_batch: int, rows: int) -> int:
    """Return the number of micro batches of a step.

    Args:
        table: `[parallel.pipelining]`.
        micro_batch: rows of a micro batch, where the table does not say how many there are.
        rows: rows of a rank in a step.
    """
    return table.micro_batches or rows // min(micro_batch, rows)


def balance_stages(blocks: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Return the ends of stages so that the most expensive one is as cheap as possible.

    Among equals, the division whose stages differ least is taken. Each stage has a block.

    Args:
        blocks: number of blocks, of cost 1 each.
        stages: number of stages, at most that of blocks.
        first: cost of the embedding.
        last: cost of the head.
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
