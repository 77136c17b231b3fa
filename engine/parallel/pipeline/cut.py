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
"""schedules in V order: stages are assigned to ranks 0, 1, ..., P - 1 and then back to 0, so that
rank 0 holds the first and the last stage"""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SCHEDULES)
"""schedules that compute the gradients of inputs and of weights in two separate passes"""


def splits_backward(table: Pipelining) -> bool:
    """Return whether a schedule computes gradients of inputs and of weights in separate passes.

    Raises:
        RecipeError: the schedule is in a file, which cannot be read or is wrong.
    """
    if table.csv:
        return read_schedule(Path(table.csv)).splits_backward
    return table.schedule in SPLIT_BACKWARD


@dataclass(frozen=True)
class StageSplit:
    """The division of a model's blocks into stages, and of stages among the ranks of a pipeline.

    Attributes:
        ranks: number of ranks of the pipeline.
        ends: for each stage, the number of the first block after it.
        stage_to_rank: the rank that holds each stage.
        shares_embedding: whether the last stage also computes with the embedding's weight.
        num_predictions: number of blocks after the last layer, which the last stage holds; they
            predict further tokens.
        num_idle: how many of these blocks no step computes.
        repeats_embedding: whether one use of the embedding in the last stage leads to another: by
            a block that predicts a further token to another one, or to a tied head.
    """

    ranks: int
    ends: tuple[int, ...]
    stage_to_rank: tuple[int, ...]
    shares_embedding: bool = False
    num_predictions: int = 0
    num_idle: int = 0
    repeats_embedding: bool = False

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ends)

    def blocks(self, stage: int) -> range:
        """Return the numbers of a stage's layers."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def held_blocks(self, stage: int) -> range:
        """Return the numbers of a stage's layers, and of its blocks that predict further tokens."""
        layers, is_last = self.blocks(stage), stage == self.stages - 1
        return range(layers.start, layers.stop + is_last * self.num_predictions)

    def computed_blocks(self, stage: int) -> range:
        """Return the numbers of the blocks of a stage that a training step computes."""
        held, is_last = self.held_blocks(stage), stage == self.stages - 1
        return range(held.start, held.stop - is_last * self.num_idle)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return self.stage_to_rank[stage]

    def stages_of(self, rank: int) -> list[int]:
        """Return a rank's stages, in order."""
        return [stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank]

    def has_embedding(self, stage: int) -> bool:
        """Return whether a stage computes with the embedding's weight."""
        return stage == 0 or (self.shares_embedding and stage == self.stages - 1)

    def other_end(self, rank: int) -> int | None:
        """Return the rank that holds the other copy of an embedding that both ends compute with.

        None where this rank holds no copy, or where one rank holds both ends, as in V schedules.
        """
        ends = {self.stage_to_rank[0], self.stage_to_rank[-1]}
        is_end = self.shares_embedding and rank in ends
        return next(iter(ends - {rank}), None) if is_end else None


@dataclass(frozen=True)
class EndCosts:
    """Time of the forward and backward passes of embedding and head, relative to one block."""

    embedding: float
    head: float


def cut_blocks(
    table: Pipelining, ranks: int, config: ModelConfig, costs: EndCosts | None = None
) -> StageSplit:
    """Return the stages that a recipe divides a model into.

    Args:
        table: the recipe's `[parallel.pipelining]`.
        ranks: number of ranks of the pipeline.
        config: the model's config.
        costs: measured costs of embedding and head by which stages are balanced; None: the
            estimates of `config`.

    Raises:
        RecipeError: the schedule file cannot be read or is invalid.
    """
    blocks: int = config.n_layers  # type: ignore[attr-defined]
    costs = costs or EndCosts(config.embed_cost, config.head_cost)
    stage_to_rank = assign_stages(table, ranks)
    if table.modules_per_stage:
        # Embedding and head always go to the first and the last stage, named there or not.
        ends = {config.layout.embed, config.layout.head}
        sizes = [len(set(names) - ends) for names in table.modules_per_stage]
        cut = tuple(accumulate(sizes))
    elif table.layers_per_stage:
        cut = tuple(accumulate(table.layers_per_stage))
    else:
        cut = balance_stages(blocks, len(stage_to_rank), costs.embedding, costs.head)
    further, trained = config.predictions, config.trained_predictions
    return StageSplit(
        ranks,
        cut,
        stage_to_rank,
        config.shares_embedding,
        further,
        further - trained,
        repeats_embedding=trained > 0 and trained + config.is_tied > 1,
    )


def stage_costs(cut: StageSplit, config: ModelConfig) -> list[float]:
    """Return the estimated cost of each stage, in units of one block's cost."""
    costs = [float(len(cut.blocks(stage))) for stage in range(cut.stages)]
    costs[0] += config.embed_cost
    costs[-1] += config.head_cost
    return costs


def assign_stages(table: Pipelining, ranks: int) -> tuple[int, ...]:
    """Return the rank that holds each stage.

    Raises:
        RecipeError: the schedule file cannot be read or is invalid.
    """
    if table.csv:
        return read_schedule(Path(table.csv)).stage_to_rank
    # torch's interleaved schedules expect stage s on rank s mod P, the V schedules stages r and
    # 2P - 1 - r on rank r.
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
        table: the recipe's `[parallel.pipelining]`.
        micro_batch: rows of a micro batch; used where the table sets no number of micro batches.
        rows: rows that a rank computes in a step.
    """
    return table.micro_batches or rows // min(micro_batch, rows)


def balance_stages(blocks: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Return the end of each stage such that the most expensive stage is as cheap as possible.

    Each stage gets at least one block. Of equally good divisions, the one with the smallest sum of
    squared costs is returned.

    Args:
        blocks: number of blocks, of cost 1 each.
        stages: number of stages, at most the number of blocks.
        first: cost of the embedding, which the first stage pays.
        last: cost of the head, which the last stage pays.
    """
    # best[n]: the cheapest way to give the first n blocks to the stages so far, and its ends.
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for stage in range(stages):
        extra = first * (stage == 0) + last * (stage == stages - 1)
        following: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for start, ((worst, squares), ends) in best.items():
            # Each of the following stages still needs a block.
            for end in range(start + 1, blocks - (stages - stage - 1) + 1):
                cost = end - start + extra
                found = ((max(worst, cost), squares + cost * cost), (*ends, end))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return best[blocks][1]
