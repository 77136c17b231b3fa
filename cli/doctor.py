"""`trainer doctor`: what this machine has, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import ExitCode
from .options import AsJson, Overrides
from .table import print_table


def doctor(
    runs: Annotated[Path, typer.Option(help="the folder where runs are kept")] = Path("runs"),
    compile_: Annotated[
        Path | None,
        typer.Option("--compile", metavar="RECIPE", help="trace what this recipe compiles"),
    ] = None,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, max=2**20, help="ranks, with --compile")] = 1,
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, process groups, kernels and disk; exit 3 if runs would fail.

    With --compile: trace a recipe's blocks and loss as torch.compile does, without its data; exit 2
    if a graph breaks, with reason and source line.
    """
    if compile_ is not None:
        raise typer.Exit(_trace(compile_, overrides or [], world, as_json))
    from ..engine.doctor.examine import examine

    findings = list(examine(runs))
    healthy = all(finding.state != "bad" for finding in findings)
    if as_json:
        report = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    else:
        rows = []
        for finding in findings:
            text = f"{finding.text}; {finding.hint}" if finding.hint else finding.text
            rows.append((finding.state, finding.subject, text))
        print_table(rows)
    raise typer.Exit(ExitCode.DONE if healthy else ExitCode.ENVIRONMENT)


def _trace(path: Path, overrides: list[str], world: int, as_json: bool) -> ExitCode:
    from ..engine.recipe.load import load_recipe

    recipe = load_recipe(path, overrides, world).recipe
    from ..engine.doctor.graphs import trace

    parts = trace(recipe, world, recipe.vocab_size)
    breaks = [(each.part, one) for each in parts for one in each.breaks]
    if as_json:
        report = {"whole": not breaks, "parts": [asdict(each) for each in parts]}
        print(json.dumps(report, indent=1))
    else:
        rows = [["PART", "LIKE IT", "GRAPHS", "OPERATIONS", "RECOMPILED", "BREAKS"]]
        for each in parts:
            counts = (each.like_it, each.graphs, each.operations, each.recompiled)
            rows.append([each.part, *map(str, counts), str(len(each.breaks))])
        print_table(rows)
        for part, one in breaks:
            print(f"{part}: {one.reason}{f' at {one.place}' if one.place else ''}")
    return ExitCode.RECIPE if breaks else ExitCode.DONE
