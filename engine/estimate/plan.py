"""What a run's ranks hold, compute and tell each other: known before any of them exists.

Torch is loaded where ranks are simulated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ..parallel.mesh import AXES, EXPERT_AXES, Degrees, expert_grid
from ..parallel.pipeline.cut import cut_blocks, num_micro_batches, stage_costs
from ..parallel.pipeline.grid import Grid, bubble_fraction, schedule_grid
from ..parallel.pipeline.schedule_file import read_schedule
from ..parallel.placement import ShardPlacement
from ..recipe.placements import placements
from .groups import Group, link_among, link_of, mesh_groups, shown_ranks

if TYPE_CHECKING:
    from ..recipe.schema import Recipe
    from .simulate.count import StepCounts

BYTES = 4
"""of a weight: all are kept in fp32"""


@dataclass(frozen=True)
class Stored:
    """Where a parameter lies, or several of the same form in different blocks.

    Attributes:
        name: with a range of blocks.
        count: of parameters.
        placed: the first of them.
        local_shape: of the largest piece that a rank stores.
        local_bytes: of that piece, once.
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
        place: in the pipeline, of the ranks that hold it.
        blocks: first and last.
        cost: of its forward pass, in blocks.
    """

    place: int
    blocks: tuple[int, int]
    cost: float


@dataclass(frozen=True)
class PipelinePlan:
    """How micro batches pass through the stages.

    Attributes:
        bubble_fraction: share of the ranks' time in which they wait, communication left out.
        grid: what each rank does, in order.
    """

    schedule: str
    micro_batches: int
    stages: list[StagePlan]
    bubble_fraction: float
    grid: Grid


@dataclass(frozen=True)
class Flow:
    """What a rank sends in a step along axes of the mesh, by one kind of collective.

    Attributes:
        ranks: of the group.
        link: whether the group stays inside a node.
        message_bytes: what the rank puts in: its piece of an all-gather, whole tensors otherwise.
        link_bytes: what it sends to its neighbour if each collective is a ring; see
            `traffic.ring_bytes`.
    """

    axes: tuple[str, ...]
    kind: str
    ranks: int
    link: str
    calls: int
    message_bytes: int
    link_bytes: int


@dataclass(frozen=True)
class Needs:
    """What the first rank of a place in the pipeline needs; the others there need the same, up to
    a row of an uneven weight.

    Attributes:
        place: in the pipeline.
        rank: the first one there.
        parameters: that it stores.
        weight_bytes: of them.
        optimizer_bytes: of the optimizer's state.
        model_flops: of a step, without what is computed again.
        again_flops: computed again in a step: recomputation, and the scores of fused attention.
        flows: what it sends in a step.
    """

    place: int
    rank: int
    parameters: int
    weight_bytes: int
    optimizer_bytes: int
    model_flops: int
    again_flops: int
    flows: list[Flow]


@dataclass(frozen=True)
class RunPlan:
    """A run, as its ranks share it.

    Attributes:
        coordinates: of ranks, by rank: of all, or of the corners of a large mesh.
        formula_flops: of a step of all ranks, by the model's formula.
        needs: by place in the pipeline.
    """

    degrees: Degrees
    gpus_per_node: int
    coordinates: dict[int, Degrees]
    groups: list[Group]
    placements: list[Stored]
    pipeline: PipelinePlan | None
    formula_flops: float
    needs: list[Needs]


def make_run_plan(
    recipe: Recipe, ranks: int, gpus_per_node: int, *, on_gpu: bool = True
) -> RunPlan:
    """Return how the ranks share a run.

    Args:
        recipe: validated for that many ranks.
        ranks: of the run.
        gpus_per_node: ranks that fast links join: 0, 1, ... are the first node's.
        on_gpu: compute as a GPU would.

    Raises:
        RecipeError, DataError: as when the run is assembled.
    """
    from .simulate.scale import RankCounter

    vocab_size = recipe.vocab_size
    degrees = recipe.parallel.degrees.resolve(ranks)
    config = recipe.model.with_vocab(vocab_size)
    stored = [store(each, degrees) for each in placements(recipe, degrees, vocab_size)]
    counter = RankCounter(recipe, ranks, vocab_size, on_gpu=on_gpu)
    tokens = recipe.data.global_batch * recipe.data.seq_len
    return RunPlan(
        degrees=degrees,
        gpus_per_node=gpus_per_node,
        coordinates={rank: degrees.coordinate(rank) for rank in shown_ranks(degrees)},
        groups=list(mesh_groups(recipe, degrees, gpus_per_node)),
        placements=fold(stored),
        pipeline=plan_pipeline(recipe, degrees, vocab_size) if degrees.pipeline > 1 else None,
        formula_flops=config.flops_per_token(recipe.data.seq_len) * tokens,
        needs=[
            needs_of(counter.count(place), place, degrees, gpus_per_node)
            for place in range(degrees.pipeline)
        ],
    )


def store(placed: ShardPlacement, degrees: Degrees) -> Stored:
    """Return what a rank stores of a parameter."""
    shape = list(placed.shape)
    # As torch.chunk cuts, first for the tensor axis: the first piece is the largest.
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
    """Return parameters of consecutive blocks that are stored alike as one."""

    def form(stored: Stored) -> tuple[object, ...]:
        placed = stored.placed
        name = re.sub(r"\.\d+\.", ".{i}.", placed.name, count=1)
        return name, placed.shape, tuple(placed.place.items()), placed.decided_by

    order = {each: number for number, each in enumerate(dict.fromkeys(map(form, parameters)))}
    found = []
    for _, alike in groupby(sorted(parameters, key=lambda p: order[form(p)]), form):
        run: list[Stored] = []
        for each in alike:
            if run and _block(each) != _block(run[-1]) + 1:
                found.append(_folded(run))
                run = []
            run.append(each)
        found.append(_folded(run))
    return found


def _block(stored: Stored) -> int:
    number = re.search(r"\.(\d+)\.", stored.placed.name)
    return int(number[1]) if number else -1


def _folded(run: Sequence[Stored]) -> Stored:
    first, last = run[0], run[-1]
    if first is last:
        return first
    blocks = f".{_block(first)}-{_block(last)}."
    name = re.sub(r"\.\d+\.", blocks, first.name, count=1)
    return replace(first, name=name, count=len(run))


def plan_pipeline(recipe: Recipe, degrees: Degrees, vocab_size: int) -> PipelinePlan:
    """Return how micro batches pass through the stages."""
    table, ranks = recipe.parallel.pipelining, degrees.pipeline
    config = recipe.model.with_vocab(vocab_size)
    cut = cut_blocks(table, ranks, config)
    share = recipe.data.global_batch // degrees.data
    micro_batches = num_micro_batches(table, recipe.data.micro_batch, share)
    costs, stages = stage_costs(cut, config), []
    for number in range(cut.stages):
        blocks = cut.blocks(number)
        stages.append(
            StagePlan(cut.rank_of(number), (blocks.start, blocks.stop - 1), costs[number])
        )
    if table.csv:
        rows = read_schedule(Path(table.csv)).rows
        grid: Grid = [[str(action) for action in row] for row in rows]
    else:
        grid = schedule_grid(table.schedule, ranks, cut.stages, micro_batches)
    name = table.csv or table.schedule
    return PipelinePlan(name, micro_batches, stages, bubble_fraction(grid, costs), grid)


def needs_of(counts: StepCounts, place: int, degrees: Degrees, gpus_per_node: int) -> Needs:
    """Return what the first rank of a place needs, from what was counted."""
    from .simulate.collectives import ring_bytes

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
    return Needs(
        place=place,
        rank=rank,
        parameters=counts.held["parameters"],
        weight_bytes=counts.held["weights"],
        optimizer_bytes=counts.held["optimizer"],
        model_flops=counts.flops["model"],
        again_flops=counts.flops["again"],
        flows=flows,
    )
