"""`trainer plan`: how a run's ranks share it, before there are any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.core.errors import RecipeError, nearest
from ..engine.core.files import require_free, write_asked
from ..engine.parallel.mesh import EXPERT_AXES
from .options import AsJson, Force, Overrides, Recipe
from .table import print_table

if TYPE_CHECKING:
    from ..engine.estimate.plan import PipelinePlan, RankCost, RunPlan
    from ..engine.estimate.roofline import Candidate

MOST_CELLS = 100
"""columns of a timeline in text"""
MOST_RANKS = 16
MOST_CANDIDATES = 10


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, max=2**20, help="ranks")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=2**20, help="ranks that fast links join")
    ] = 8,
    html: Annotated[Path | None, typer.Option(help="also draw it, on a page of its own")] = None,
    search: Annotated[bool, typer.Option("--search", help="rank the plans that fit --gpu")] = False,
    gpu: Annotated[str, typer.Option(help="with --search: such as h100 or h200")] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="as computed on this machine's CPU")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Print mesh, placement of parameters, pipeline, work and traffic of a run; no GPU is needed.

    Work and traffic are counted while the step that would train runs without numbers. With
    --search, the ways to split the run that fit a GPU are ranked by an estimated step time.
    """
    from ..engine.recipe.load import load_recipe

    if search:
        _search(recipe, overrides or [], world, gpu, gpus_per_node, as_json)
        return
    if gpu:
        raise RecipeError("--gpu without --search", "trainer estimate-memory says what fits a GPU")
    from ..engine.estimate.plan import make_run_plan

    loaded = load_recipe(recipe, overrides or [], world).recipe
    if html and not force:
        require_free(html)  # not after minutes of work
    found = make_run_plan(loaded, world, gpus_per_node, on_gpu=not cpu)
    if html:
        from ..engine.estimate.plan_page import draw_plan

        page = draw_plan(found, loaded.run.name)
        write_asked(html, page, replace=force, hint="give another file with --html")
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        _print(found)


def _print(found: RunPlan) -> None:
    _print_mesh(found)
    print("\nParameters, and what one rank stores of each")
    print_table(list(_placement_rows(found)))
    if found.pipeline:
        print()
        _print_pipeline(found.pipeline)
    print("\nA step, of the first rank at each place of the pipeline")
    print_table(list(_needs_rows(found)))
    print(_work(found))
    print("\nSent by a rank in a step")
    print_table(list(_flow_rows(found.needs)))
    print("MESSAGE: what the rank puts in. LINK BYTES: what a ring makes it send to its neighbour.")


def _print_mesh(found: RunPlan) -> None:
    degrees = found.degrees.by_axis
    degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
    text = f"{found.degrees.world} ranks = {_axes(degrees)}; {found.gpus_per_node} ranks a node"
    if found.degrees.expert > 1:
        text += f"; {found.degrees.expert} ranks share the experts"
    if found.degrees.expert_tensor > 1:
        text += f"; {found.degrees.expert_tensor} neighbours share each expert"
    print(f"Mesh: {text}")
    if not degrees:
        return
    print()
    rows = [["RANK", "NODE", *(axis.upper() for axis in degrees)]]
    for rank, place in found.coordinates.items():
        node = str(rank // found.gpus_per_node)
        rows.append([str(rank), node, *(str(getattr(place, axis)) for axis in degrees)])
    print_table(rows)
    if len(found.coordinates) < found.degrees.world:
        print("(the corners of the mesh)")
    print()
    rows = [["RANKS THAT TALK ALONG", "RANKS", "GROUPS", "LINK", "FIRST GROUP"]]
    for group in found.groups:
        first = ", ".join(map(str, group.first))
        more = ", ..." if group.ranks > len(group.first) else ""
        sizes = [str(group.ranks), str(group.groups)]
        rows.append([" x ".join(group.axes), *sizes, group.link, first + more])
    print_table(rows)


def _placement_rows(found: RunPlan) -> Iterator[list[str]]:
    also = [axis for axis in EXPERT_AXES if getattr(found.degrees, axis) > 1]
    axes = ["tensor", "shard", *also]
    shown = [axis.upper() for axis in axes]
    yield ["NAME", "SHAPE", *shown, "LOCAL", "BYTES", "DECIDED BY"]
    for each in found.placements:
        dims = [each.placed.place.get(axis) for axis in axes]
        yield [
            each.name,
            _shape(each.placed.shape),
            *("-" if dim is None else f"dim {dim}" for dim in dims),
            _shape(each.local_shape),
            _size(each.local_bytes) + (f" x {each.count}" if each.count > 1 else ""),
            each.placed.decided_by,
        ]


def _print_pipeline(pipeline: PipelinePlan) -> None:
    print(
        f"Pipeline: {pipeline.schedule}, {pipeline.micro_batches} micro batches, bubble "
        f"{pipeline.bubble_fraction:.1%} (communication left out)"
    )
    rows = [["STAGE", "PLACE", "BLOCKS", "COST IN BLOCKS"]]
    for number, stage in enumerate(pipeline.stages):
        blocks = "{}-{}".format(*stage.blocks)
        rows.append([str(number), str(stage.place), blocks, f"{stage.cost:.2f}"])
    print_table(rows)
    width = max(len(cell or "") for row in pipeline.grid for cell in row) + 1
    length = max(map(len, pipeline.grid))
    if len(pipeline.grid) <= MOST_RANKS and width * length <= MOST_CELLS * 2:
        for place, row in enumerate(pipeline.grid):
            print(f"{place:>3} " + "".join((cell or ".").ljust(width) for cell in row).rstrip())


def _needs_rows(found: RunPlan) -> Iterator[list[str]]:
    yield ["PLACE", "RANK", "PARAMETERS", "WEIGHTS", "OPTIMIZER", "TFLOP", "COMPUTED AGAIN"]
    for needs in found.needs:
        yield [
            str(needs.place),
            str(needs.rank),
            f"{needs.parameters:,}",
            _size(needs.weight_bytes),
            _size(needs.optimizer_bytes),
            f"{needs.model_flops / 1e12:.4g}",
            f"{needs.again_flops / 1e12:.4g}",
        ]


def _work(found: RunPlan) -> str:
    a_place = found.degrees.world // found.degrees.pipeline
    counted = a_place * sum(needs.model_flops for needs in found.needs)
    formula = found.formula_flops
    return (
        f"All ranks: {counted / 1e12:.6g} TFLOP counted, {formula / 1e12:.6g} by formula (6 a "
        "weight and token, and causal attention)"
    )


def _flow_rows(places: Sequence[RankCost]) -> Iterator[list[str]]:
    yield ["PLACES", "AXES", "COLLECTIVE", "RANKS", "LINK", "CALLS", "MESSAGE", "LINK BYTES"]
    flows: dict[tuple[str, ...], list[int]] = {}
    for needs in places:
        for flow in needs.flows:
            numbers = (str(flow.calls), f"{flow.message_bytes:,}", f"{flow.link_bytes:,}")
            along = " x ".join(flow.axes)
            key: tuple[str, ...] = (along, flow.kind, str(flow.ranks), flow.link, *numbers)
            flows.setdefault(key, []).append(needs.place)
    for key, held in sorted(flows.items(), key=lambda item: (item[0][0], item[0][1], item[1])):
        yield [_ranges(held), *key]


def _axes(degrees: Mapping[str, int]) -> str:
    large = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return " x ".join(large) or "one rank"


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-2, 5 for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _search(
    recipe: Path, overrides: list[str], world: int, gpu: str, gpus_per_node: int, as_json: bool
) -> None:
    from ..engine.estimate.devices import DEVICES, GPU_MIB
    from ..engine.estimate.search import search
    from ..engine.recipe.load import load_recipe

    if gpu not in DEVICES:
        hint = nearest(gpu, DEVICES) or f"known: {', '.join(DEVICES)}"
        raise RecipeError(f"--gpu {gpu}: not known" if gpu else "--search needs --gpu", hint)
    loaded = load_recipe(recipe, overrides).recipe
    memory = GPU_MIB[gpu] * 2**20
    found = search(loaded, world, gpu, memory, gpus_per_node)[:MOST_CANDIDATES]
    if as_json:
        rows = [asdict(each) | {"seconds": each.seconds} for each in found]
        print(json.dumps(rows, indent=1))
        return
    print(f"Plans of {world} ranks that fit {gpu}, by ESTIMATED seconds of a step: a roofline, no")
    print("measurement. Peaks of the first ones are simulated, those of the others by formula.")
    print_table(list(_candidate_rows(found)))
    print(_reason(found[0]))
    print(" ".join(f"--set {each}" for each in found[0].overrides()))


def _candidate_rows(found: Sequence[Candidate]) -> Iterator[list[str]]:
    yield [
        *("STEP s", "PRODUCTS", "EXPOSED", "BUBBLE", "UPDATE", "GiB", "SIMULATED"),
        *("MICRO", "RECOMPUTE", "PLAN"),
    ]
    for each in found:
        parts = (
            each.compute_seconds,
            each.exposed_seconds,
            each.bubble_seconds,
            each.optimizer_seconds,
        )
        peak = each.simulated_bytes
        yield [
            f"{each.seconds:.3g}",
            *(f"{part / each.seconds:.0%}" for part in parts),
            f"{each.memory_bytes / 2**30:.1f}",
            "" if peak is None else f"{peak / 2**30:.1f}",
            str(each.micro_batch),
            each.recompute,
            _axes(each.degrees.by_axis),
        ]


def _reason(best: Candidate) -> str:
    parts = {
        "products": best.compute_seconds,
        "communication that products do not hide": best.exposed_seconds,
        "waiting in the pipeline": best.bubble_seconds,
        "the optimizer": best.optimizer_seconds,
    }
    shares = sorted(parts.items(), key=lambda part: -part[1])
    text = ", ".join(f"{part / best.seconds:.0%} {name}" for name, part in shares if part)
    return f"The first one's time: {text}. To run it:"
