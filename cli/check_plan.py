"""`trainer check-plan`: whether a recipe's plan computes what one process does."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.core.errors import ExitCode
from ..engine.core.text.display import format_value
from ..engine.estimate.plan_tables import describe_axes
from ..engine.parallel.mesh import AXES, EXPERT_AXES
from .options import AsJson, Overrides, Recipe
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.check.check_plan import Difference, Verdict
    from ..engine.parallel.mesh import Degrees


def check_plan(
    recipe: Recipe,
    overrides: Overrides = None,
    world: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="ranks; default: what the degrees make")
    ] = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="in the recipe's precision instead of float64")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare a recipe's plan with one process, on processes of this machine's CPU.

    A small model of the same structure trains two steps under the plan, its axes shrunk to at most
    8 ranks where they can be, and on one process. Compared are the routing of experts, the losses
    and the gradient of each parameter: in float64 to 1e-9; with --as-is the plan may be twice as
    far from float64 as one process. Exit code 8: they differ.
    """
    from ..engine.check.check_plan import check_plan, find_world
    from ..engine.check.workers import RankPool
    from ..engine.recipe.load import load_recipe

    def load(ranks: int | None) -> Any:
        return load_recipe(recipe, overrides or [], ranks).recipe

    loaded, ranks = (load(world), world) if world else find_world(load(None), load)
    with RankPool() as pool:
        verdict = check_plan(loaded, ranks, pool, as_is=as_is, say=_say)
    if as_json:
        print(json.dumps(_as_json(verdict, ranks), indent=1))
    else:
        _print(verdict, loaded.parallel.degrees.resolve(ranks))
    if verdict.difference:
        raise typer.Exit(ExitCode.DIFFERENT)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        echo(f"computing: {text}", err=True)


def _as_json(verdict: Verdict, world: int) -> dict[str, Any]:
    content = asdict(verdict)
    shrunk = content.pop("shrunk")
    sizes = {key: list(values) for key, values in verdict.shrunk.sizes.items()}
    del shrunk["recipe"], shrunk["notes"]
    return {
        "world": world,
        "ranks": verdict.shrunk.degrees.world,
        **shrunk,
        "sizes": sizes,
        **content,
    }


def _print(verdict: Verdict, given: Degrees) -> None:
    shrunk = verdict.shrunk
    echo(f"Plan: {_describe_axes(given)}; checked: {_describe_axes(shrunk.degrees)}")
    rows = [[key, format_value(old), format_value(new)] for key, (old, new) in shrunk.sizes.items()]
    print_table([["SHRUNK", "RECIPE", "CHECK"], *rows])
    if verdict.notes:
        echo("\nNot as in the recipe:")
    for note in verdict.notes:
        echo(f"  {note}")
    echo(f"\n{verdict.layers} layers of experts, {verdict.parameters} parameters")
    if verdict.alone is None:
        echo(
            f"largest difference of a loss {verdict.loss:.1e}, of a gradient {verdict.gradient:.1e}"
        )
    else:
        alone = f"of one process {verdict.alone:.2e}"
        echo(f"distance of gradients from float64: {verdict.gradient:.2e}, {alone}")
    echo(_describe_difference(verdict.difference) if verdict.difference else "equal")


def _describe_axes(degrees: Degrees) -> str:
    axes = {axis: getattr(degrees, axis) for axis in (*AXES, *EXPERT_AXES)}
    ranks = f"{degrees.world} ranks"
    return f"{ranks} ({describe_axes(axes)})" if degrees.world > 1 else "one process"


def _describe_difference(found: Difference) -> str:
    axes = " and ".join(found.axes) or "none alone, nor two of them"
    if found.what == "routing":
        text = f"DIFFERENT in step {found.step}: experts of {found.name} get other tokens"
    else:
        text = f"DIFFERENT in step {found.step}: {found.what}, by {found.size:.1e}"
        text += f"; first parameter: {found.name}"
    return f"{text}; axis: {axes}"
