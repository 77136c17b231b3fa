"""`trainer plan`: how a run's ranks share it, before there are any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.core.errors import RecipeError, nearest
from ..engine.core.files import require_free, write_asked
from ..engine.estimate import plan_tables
from .complete import complete_gpu
from .options import AsJson, Force, Overrides, Recipe
from .table import print_table

if TYPE_CHECKING:
    from ..engine.estimate.plan import RunPlan
    from ..engine.estimate.roofline import Candidate
    from ..engine.parallel.pipeline.grid import Grid

MOST_CELLS = 100
"""columns of a timeline in text"""
MOST_RANKS = 16
MOST_CANDIDATES = 10
DEFAULT_GPU = "h100"


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, max=2**20, help="ranks")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=2**20, help="ranks that fast links join")
    ] = 8,
    html: Annotated[Path | None, typer.Option(help="also draw it, on a page of its own")] = None,
    search: Annotated[bool, typer.Option("--search", help="rank the plans that fit --gpu")] = False,
    gpu: Annotated[
        str,
        typer.Option(autocompletion=complete_gpu, help="whose speed is estimated, such as h200"),
    ] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="as computed on this machine's CPU")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Print mesh, placement of parameters, pipeline, work and traffic of a run; no GPU is needed.

    Work and traffic are counted while the step that would train runs without numbers. The speed on
    --gpu (h100) is an estimate of what well-tuned engines reach. With --search, the ways to split
    the run that fit a GPU are ranked by that estimate.
    """
    from ..engine.estimate.devices import DEVICES
    from ..engine.recipe.load import load_recipe

    if gpu and gpu not in DEVICES:
        hint = nearest(gpu, DEVICES) or f"known: {', '.join(DEVICES)}"
        raise RecipeError(f"--gpu {gpu}: not known", hint)
    if search:
        _search(recipe, overrides or [], world, gpu, gpus_per_node, as_json)
        return
    if cpu and gpu:
        raise RecipeError("--gpu with --cpu", "give one of the two")
    loaded = load_recipe(recipe, overrides or [], world).recipe
    if html and not force:
        require_free(html)  # not after minutes of work
    from ..engine.estimate.plan import make_run_plan
    from ..engine.estimate.speed import estimate_speed

    run_plan = make_run_plan(loaded, world, gpus_per_node, on_gpu=not cpu)
    speed = None if cpu else estimate_speed(loaded, world, gpu or DEFAULT_GPU, gpus_per_node)
    if html:
        from ..engine.estimate.plan_page import draw_plan

        page = draw_plan(run_plan, loaded.run.name)
        write_asked(html, page, replace=force, hint="give another file with --html")
    if as_json:
        print(json.dumps(asdict(run_plan) | (speed.as_json() if speed else {}), indent=1))
    else:
        _print(run_plan)
        if speed:
            print(f"\n{speed.describe()}")


def _print(plan: RunPlan) -> None:
    print(f"Mesh: {plan_tables.describe_mesh(plan)}")
    if plan.groups:
        print()
        print_table(list(plan_tables.coordinate_rows(plan)))
        if len(plan.coordinates) < plan.degrees.world:
            print("(the corners of the mesh)")
        print()
        print_table(list(plan_tables.group_rows(plan)))
    print("\nParameters, and what one rank stores of each")
    print_table(list(plan_tables.placement_rows(plan)))
    if plan.pipeline:
        print(f"\n{plan_tables.describe_pipeline(plan.pipeline)}")
        print_table(list(plan_tables.stage_rows(plan.pipeline)))
        _print_timeline(plan.pipeline.grid)
    print("\nA step, of the first rank at each place of the pipeline")
    print_table(list(plan_tables.cost_rows(plan)))
    print(plan_tables.describe_flops(plan))
    if plan.row_lengths:
        print(plan.row_lengths)
    print("\nSent by a rank in a step")
    print_table(list(plan_tables.flow_rows(plan)))
    print("MESSAGE: what the rank puts in. LINK BYTES: what a ring makes it send to its neighbour.")


def _print_timeline(grid: Grid) -> None:
    width = max(len(cell or "") for row in grid for cell in row) + 1
    if len(grid) <= MOST_RANKS and width * max(map(len, grid)) <= MOST_CELLS * 2:
        for place, row in enumerate(grid):
            print(f"{place:>3} " + "".join((cell or ".").ljust(width) for cell in row).rstrip())


def _search(
    recipe: Path, overrides: list[str], world: int, gpu: str, gpus_per_node: int, as_json: bool
) -> None:
    from ..engine.estimate.devices import DEVICES, GPU_MIB
    from ..engine.recipe.load import load_recipe

    if not gpu:
        raise RecipeError("--search needs --gpu", f"known: {', '.join(DEVICES)}")
    loaded = load_recipe(recipe, overrides).recipe
    from ..engine.estimate.memory import describe_row_lengths
    from ..engine.estimate.search import search

    memory = GPU_MIB[gpu] * 2**20
    candidates = search(loaded, world, gpu, memory, gpus_per_node)[:MOST_CANDIDATES]
    if as_json:
        rows = [asdict(one) | {"seconds": one.seconds} for one in candidates]
        print(json.dumps(rows, indent=1))
        return
    print(f"Plans of {world} ranks that fit {gpu}, by ESTIMATED seconds of a step in a well-tuned")
    print("engine. Peaks of the first ones are simulated, those of the others by formula.")
    if row_lengths := describe_row_lengths(loaded):
        print(row_lengths)
    print_table(list(_candidate_rows(candidates)))
    best = candidates[0]
    shares = sorted(best.parts().items(), key=lambda part: -part[1])
    text = ", ".join(f"{part / best.seconds:.0%} {name}" for name, part in shares if part)
    print(f"The first one's time: {text}. To run it:")
    print(" ".join(f"--set {override}" for override in best.overrides()))


def _candidate_rows(candidates: Sequence[Candidate]) -> Iterator[list[str]]:
    yield [
        *("STEP s", "COMPUTE", "EXPOSED", "BUBBLE", "UPDATE", "GiB", "SIMULATED"),
        *("MICRO", "RECOMPUTE", "PLAN"),
    ]
    for one in candidates:
        peak = one.simulated_bytes
        yield [
            f"{one.seconds:.3g}",
            *(f"{part / one.seconds:.0%}" for part in one.parts().values()),
            f"{one.memory_bytes / 2**30:.1f}",
            "" if peak is None else f"{peak / 2**30:.1f}",
            str(one.micro_batch),
            one.recompute,
            plan_tables.describe_axes(one.degrees.by_axis),
        ]
