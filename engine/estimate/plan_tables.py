"""The tables of a plan as rows of text, titles first, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..parallel.mesh import EXPERT_AXES

if TYPE_CHECKING:
    from .plan import PipelinePlan, RunPlan

Rows = Iterator[list[str]]


def describe_mesh(plan: RunPlan) -> str:
    """Return the world size, the degrees and the size of a node in one line."""
    text = f"{plan.degrees.world} ranks = {describe_axes(plan.degrees.by_axis)}"
    text += f"; {plan.gpus_per_node} ranks a node"
    if plan.degrees.expert > 1:
        text += f"; experts divided among {plan.degrees.expert} ranks"
    if plan.degrees.expert_tensor > 1:
        text += f"; each expert divided among {plan.degrees.expert_tensor} ranks"
    return text


def describe_axes(degrees: dict[str, int]) -> str:
    """Return the axes of more than one rank with their degrees."""
    large = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return " x ".join(large) or "one rank"


def coordinate_rows(plan: RunPlan) -> Rows:
    """Yield the node and the coordinates of ranks: of all, or of the corners of a large mesh."""
    axes = [axis for axis, degree in plan.degrees.by_axis.items() if degree > 1]
    yield ["RANK", "NODE", *map(str.upper, axes)]
    for rank, coordinate in plan.coordinates.items():
        place = [str(getattr(coordinate, axis)) for axis in axes]
        yield [str(rank), str(rank // plan.gpus_per_node), *place]


def group_rows(plan: RunPlan) -> Rows:
    """Yield the process groups of the mesh."""
    yield ["PROCESS GROUPS", "RANKS", "GROUPS", "LINK", "FIRST GROUP"]
    for group in plan.groups:
        first = ", ".join(map(str, group.first)) + ", ..." * (group.ranks > len(group.first))
        sizes = [str(group.ranks), str(group.groups)]
        yield [" x ".join(group.axes), *sizes, group.link, first]


def placement_rows(plan: RunPlan) -> Rows:
    """Yield the parameters, and what one rank stores of each."""
    expert = [axis for axis in EXPERT_AXES if getattr(plan.degrees, axis) > 1]
    axes = ["tensor", "shard", *expert]
    yield ["NAME", "SHAPE", *map(str.upper, axes), "LOCAL", "BYTES", "DECIDED BY"]
    for stored in plan.placements:
        dims = [stored.placed.place.get(axis) for axis in axes]
        yield [
            stored.name,
            " x ".join(map(str, stored.placed.shape)),
            *("-" if dim is None else f"dim {dim}" for dim in dims),
            " x ".join(map(str, stored.local_shape)),
            format_size(stored.local_bytes) + (f" x {stored.count}" if stored.count > 1 else ""),
            stored.placed.decided_by,
        ]


def describe_pipeline(pipeline: PipelinePlan) -> str:
    """Return the schedule and the pipeline bubble in one line."""
    return (
        f"Pipeline: {pipeline.schedule}, {pipeline.micro_batches} micro batches, bubble "
        f"{pipeline.bubble_fraction:.1%} (communication left out)"
    )


def stage_rows(pipeline: PipelinePlan) -> Rows:
    """Yield the stages of the pipeline."""
    yield ["STAGE", "PLACE", "BLOCKS", "COST IN BLOCKS"]
    for number, stage in enumerate(pipeline.stages):
        yield [str(number), str(stage.place), "{}-{}".format(*stage.blocks), f"{stage.cost:.2f}"]


def cost_rows(plan: RunPlan) -> Rows:
    """Yield the memory and the FLOPs of a step, of the first rank at each place."""
    yield ["PLACE", "RANK", "PARAMETERS", "WEIGHTS", "OPTIMIZER", "TFLOP", "RECOMPUTED", "UPDATE"]
    for cost in plan.needs:
        yield [
            str(cost.place),
            str(cost.rank),
            f"{cost.parameters:,}",
            format_size(cost.weight_bytes),
            format_size(cost.optimizer_bytes),
            f"{cost.model_flops / 1e12:.4g}",
            f"{cost.again_flops / 1e12:.4g}",
            f"{cost.optimizer_flops / 1e12:.4g}",
        ]


def describe_flops(plan: RunPlan) -> str:
    """Return the FLOPs of a step of all ranks, counted and by formula, in one line."""
    ranks_per_place = plan.degrees.world // plan.degrees.pipeline
    counted = ranks_per_place * sum(cost.model_flops for cost in plan.needs)
    return (
        f"All ranks: {counted / 1e12:.6g} TFLOP counted, {plan.formula_flops / 1e12:.6g} by "
        "formula (6 a weight and token, and causal attention)"
    )


def flow_rows(plan: RunPlan) -> Rows:
    """Yield the traffic of a rank in a step; places with the same traffic share a row."""
    yield ["PLACES", "AXES", "COLLECTIVE", "RANKS", "LINK", "CALLS", "MESSAGE", "LINK BYTES"]
    places: dict[tuple[str, ...], list[int]] = {}
    for cost in plan.needs:
        for flow in cost.flows:
            numbers = (str(flow.calls), f"{flow.message_bytes:,}", f"{flow.link_bytes:,}")
            group = (" x ".join(flow.axes), flow.kind, str(flow.ranks), flow.link)
            places.setdefault((*group, *numbers), []).append(cost.place)
    for key, held in sorted(places.items(), key=lambda item: (*item[0][:2], item[1])):
        yield [_ranges(held), *key]


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-2, 5 for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def format_size(count: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
