"""Plans what each rank of a run stores, computes and sends, from simulations of some ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ...model_zoo.config import ModelConfig
from ..parallel.mesh import AXES, EXPERT_AXES, Degrees, expert_grid
from ..parallel.pipeline.cut import cut_blocks, num_micro_batches, stage_costs
from ..parallel.pipeline.grid import Grid, bubble_fraction, schedule_grid
from ..parallel.pipeline.schedule_file import read_schedule
from ..parallel.placement import ShardPlacement
from ..parallel.tables import Pipelining
from ..recipe.placements import placements
from ..recipe.schema import Recipe
from .groups import Group, link_among, link_of, mesh_groups, ring_bytes, shown_ranks
from .memory import describe_row_lengths
from .simulate.count import StepCounts
from .simulate.extrapolate import count_ranks

BYTES = 4
"""bytes of an element: master weights are stored in fp32"""


@dataclass(frozen=True)
class Stored:
    """The placement of a parameter, or of the same parameter in several consecutive blocks.

    Attributes:
        name: the parameter's name, with a range in place of the block number.
        count: the number of parameters that this entry stands for.
        placed: the placement of the first of them.
        local_shape: the shape of the largest shard on a rank.
        local_bytes: the bytes of that shard of one parameter.
    """

    name: str
    count: int
    placed: ShardPlacement
    local_shape: tuple[int, ...]
    local_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """A stage of the pipeline.

    Attributes:
        place: coordinate on the pipeline axis of the ranks that hold the stage.
        blocks: the numbers of the first and last block, inclusive.
        cost: the cost of the forward pass, in units of one block.
    """

    place: int
    blocks: tuple[int, int]
    cost: float


@dataclass(frozen=True)
class PipelinePlan:
    """How micro batches pass through the stages.

    Attributes:
        schedule: name of the schedule, or path of its CSV file.
        micro_batches: micro batches of a step on each data-parallel replica.
        stages: the stages in order.
        bubble_fraction: share of time in which ranks are idle, communication not counted.
        grid: the actions of each rank, one list a rank.
    """

    schedule: str
    micro_batches: int
    stages: list[StagePlan]
    bubble_fraction: float
    grid: Grid


@dataclass(frozen=True)
class Flow:
    """The traffic of one kind of collective over one process group in a step.

    Attributes:
        axes: the mesh axes of the process group.
        kind: the collective, such as `groups.ALL_GATHER`.
        ranks: the size of the process group.
        link: `INSIDE` if the group stays inside a node, else `ACROSS`.
        calls: the number of collectives in a step.
        message_bytes: bytes of the rank's inputs: its shard for an all-gather, else whole tensors.
        link_bytes: bytes sent to the neighbour in a ring; see `groups.ring_bytes`.
    """

    axes: tuple[str, ...]
    kind: str
    ranks: int
    link: str
    calls: int
    message_bytes: int
    link_bytes: int


@dataclass(frozen=True)
class RankCost:
    """The cost of a step on the first rank of a pipeline coordinate.

    The other ranks there cost the same, up to one row of an unevenly sharded weight.

    Attributes:
        place: the coordinate on the pipeline axis.
        rank: the first rank with this coordinate.
        parameters: the number of parameters that the rank stores.
        weight_bytes: the bytes of these parameters.
        optimizer_bytes: the bytes of the optimizer state.
        model_flops: the FLOPs of a step, without recomputation.
        optimizer_flops: the FLOPs of the optimizer's matmuls in a step.
        again_flops: the recomputed FLOPs of a step, including fused attention's scores.
        flows: the traffic that the rank sends in a step.
    """

    place: int
    rank: int
    parameters: int
    weight_bytes: int
    optimizer_bytes: int
    model_flops: int
    again_flops: int
    optimizer_flops: int
    flows: list[Flow]


@dataclass(frozen=True)
class RunPlan:
    """The division of a run over its ranks.

    Attributes:
        coordinates: mesh coordinates by rank: of all ranks, or of the corners of a large mesh.
        placements: the placement of each parameter, equal blocks folded.
        pipeline: the pipeline, or None if there is one stage.
        formula_flops: FLOPs of a step on all ranks, by the model's formula.
        needs: the cost of a rank at each pipeline coordinate.
        row_lengths: how rows of unequal lengths are counted; empty: rows have one length.
    """

    degrees: Degrees
    gpus_per_node: int
    coordinates: dict[int, Degrees]
    groups: list[Group]
    placements: list[Stored]
    pipeline: PipelinePlan | None
    formula_flops: float
    needs: list[RankCost]
    row_lengths: str = ""


def make_run_plan(
    recipe: Recipe, ranks: int, gpus_per_node: int, *, on_gpu: bool = True
) -> RunPlan:
    """Plan how the ranks of a run share parameters, computation and traffic.

    Args:
        recipe: a recipe that is validated for that many ranks.
        ranks: the world size.
        gpus_per_node: the number of consecutive ranks in a node.
        on_gpu: True to simulate the implementations that a GPU would use.

    Raises:
        RecipeError, DataError: as when the run is assembled.
    """
    vocab_size, recipe = recipe.vocab_size, recipe.for_largest_split()
    degrees = recipe.parallel.degrees.resolve(ranks)
    config = recipe.model.with_vocab(vocab_size)
    stored = [store(each, degrees) for each in placements(recipe, degrees, vocab_size)]
    costs = count_ranks(recipe, ranks, vocab_size, on_gpu=on_gpu)
    data, pipeline = recipe.data, None
    positions = data.global_batch * recipe.task.positions(data)
    if degrees.pipeline > 1:
        table, share = recipe.parallel.pipelining, data.global_batch // degrees.data
        micro_batches = num_micro_batches(table, data.micro_batch, share)
        pipeline = plan_pipeline(table, degrees.pipeline, config, micro_batches)
    return RunPlan(
        degrees=degrees,
        gpus_per_node=gpus_per_node,
        coordinates={rank: degrees.coordinate(rank) for rank in shown_ranks(degrees)},
        groups=list(
            mesh_groups(degrees, gpus_per_node, sharded=recipe.parallel.is_sharded(degrees))
        ),
        placements=fold(stored),
        pipeline=pipeline,
        formula_flops=config.flops_per_token(data.seq_len) * positions,
        needs=[
            rank_cost(counts, place, degrees, gpus_per_node) for place, counts in enumerate(costs)
        ],
        row_lengths=describe_row_lengths(recipe),
    )


def store(placed: ShardPlacement, degrees: Degrees) -> Stored:
    """Return the largest shard of a parameter that a rank stores."""
    shape = list(placed.shape)
    # Shards are cut as by torch.chunk, so the first is the largest: round up.
    axes = {
        "expert": degrees.expert,
        "expert_tensor": degrees.expert_tensor,
        "tensor": degrees.tensor,
        "shard": degrees.fsdp,
    }
    if "expert" in placed.place:
        _, axes["shard"] = expert_grid(degrees, sharded=True)
    for axis, ranks in axes.items():
        dim = placed.place.get(axis)
        if dim is not None:
            shape[dim] = -(-shape[dim] // ranks)
    return Stored(placed.name, 1, placed, tuple(shape), prod(shape) * BYTES)


def fold(parameters: Sequence[Stored]) -> list[Stored]:
    """Merge parameters of consecutive blocks that have the same placement into one entry."""

    def form(stored: Stored) -> tuple[object, ...]:
        placed = stored.placed
        name = re.sub(r"\.\d+\.", ".{i}.", placed.name, count=1)
        return name, placed.shape, tuple(placed.place.items()), placed.decided_by

    by_form: dict[object, list[list[Stored]]] = {}
    for parameter in parameters:
        runs = by_form.setdefault(form(parameter), [])
        if runs and block_of(parameter) == block_of(runs[-1][-1]) + 1:
            runs[-1].append(parameter)
        else:
            runs.append([parameter])
    return [fold_run(run) for runs in by_form.values() for run in runs]


def fold_run(run: Sequence[Stored]) -> Stored:
    """Merge the same parameter of consecutive blocks into one entry, named by the block range."""
    if len(run) == 1:
        return run[0]
    blocks = f".{block_of(run[0])}-{block_of(run[-1])}."
    return replace(run[0], name=re.sub(r"\.\d+\.", blocks, run[0].name, count=1), count=len(run))


def block_of(stored: Stored) -> int:
    """Return the number of a parameter's block, or -1 outside of blocks."""
    number = re.search(r"\.(\d+)\.", stored.placed.name)
    return int(number[1]) if number else -1


def plan_pipeline(
    table: Pipelining, ranks: int, config: ModelConfig, micro_batches: int
) -> PipelinePlan:
    """Return the stages, schedule and bubble of a pipeline of `ranks` ranks."""
    cut = cut_blocks(table, ranks, config)
    costs = stage_costs(cut, config)
    stages = [
        StagePlan(cut.rank_of(number), (held[0], held[-1]), cost)
        for number, cost in enumerate(costs)
        for held in [cut.held_blocks(number)]
    ]
    if table.csv:
        rows = read_schedule(Path(table.csv)).rows
        grid: Grid = [[str(action) for action in row] for row in rows]
    else:
        grid = schedule_grid(table.schedule, ranks, cut.stages, micro_batches)
    name = table.csv or table.schedule
    return PipelinePlan(name, micro_batches, stages, bubble_fraction(grid, costs), grid)


def rank_cost(counts: StepCounts, place: int, degrees: Degrees, gpus_per_node: int) -> RankCost:
    """Return the cost of a step on the first rank of a pipeline coordinate, from its counts."""
    rank = place * (degrees.world // degrees.pipeline)
    flows = []
    for route, size in counts.message_bytes.items():
        if route.part:
            ranks, stride = route.part
            link = link_among(range(rank, rank + ranks * stride, stride), gpus_per_node)
        else:
            ranks = prod(getattr(degrees, axis) for axis in route.axes)
            link = link_of(degrees, rank, route.axes, route.kind, gpus_per_node)
        calls, sent = counts.calls[route], ring_bytes(route.kind, size, ranks)
        flows.append(Flow(route.axes, route.kind, ranks, link, calls, size, sent))
    order = (*AXES, *EXPERT_AXES)
    flows.sort(key=lambda flow: (len(flow.axes), order.index(flow.axes[0]), flow.kind, flow.ranks))
    return RankCost(
        place=place,
        rank=rank,
        parameters=counts.held["parameters"],
        weight_bytes=counts.held["weights"],
        optimizer_bytes=counts.held["optimizer"],
        model_flops=counts.flops["model"],
        again_flops=counts.flops["again"],
        optimizer_flops=counts.flops["optimizer"],
        flows=flows,
    )
