"""`trainer sweep`: several runs of one recipe. Imports no torch, but for `--index`."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.errors import ExitCode, RecipeError
from ..engine.observe.metrics import plain
from ..engine.recipe.load import load_recipe
from ..engine.redact import require_no_secret
from ..engine.status import RunStatus
from ..engine.sweep.folder import Sweep
from ..engine.sweep.points import make_points
from .options import AsJson, Overrides, Recipe
from .table import print_table

Axes = list[str] | None


def sweep(
    recipe: Recipe,
    grid: Annotated[
        Axes,
        typer.Option("--grid", metavar="KEY=A,B", help="vary a key; or KEY=log:1e-4..1e-2:5"),
    ] = None,
    zips: Annotated[
        Axes, typer.Option("--zip", metavar="KEY=A,B", help="vary keys together, value by value")
    ] = None,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="default: {run.dir}/sweeps/{run.name}")
    ] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, max=4096, help="processes of each run")
    ] = 1,
    go_on: Annotated[
        bool, typer.Option("--continue-on-error", help="start the next run when one fails")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the points, run none")] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="write a job array's batch script, run none")
    ] = False,
    index: Annotated[
        int | None, typer.Option("--index", min=0, help="run this point alone, from 0")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe at each point of a grid; the same command again goes on after a stop."""
    points = make_points(grid or [], zips or [])
    base = load_base(recipe, overrides or [])
    planned = Sweep(recipe, tuple(overrides or []), points, folder or base)
    if index is not None:
        raise typer.Exit(_run_one(planned, index, nproc))
    recipes = planned.load(world=nproc)
    if dry_run:
        _print(planned, None, as_json)
    elif slurm:
        _write_array(planned, grid or [], zips or [], nproc, as_json)
    else:
        from ..engine.launch.environment import find_world
        from ..engine.sweep.runner import run_points

        if (launcher := find_world().launcher) != "none":
            raise RecipeError(
                f"a sweep inside a job of {launcher}", "give --index N, or see --slurm"
            )
        planned.write_manifest()
        with _stdout_free(as_json):
            say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
            code = run_points(planned, recipes, nproc, go_on=go_on, say=say)
        report = planned.write_report()
        _print(planned, report, as_json)
        raise typer.Exit(code)


def load_base(recipe: Path, overrides: list[str]) -> Path:
    """Return the folder that a recipe's sweep has if none is given.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    try:
        run = load_recipe(recipe, overrides).recipe.run
    except RecipeError:
        if not recipe.is_file():
            raise
        return Path("runs/sweeps") / recipe.stem  # perhaps it lacks what every point gives
    return Path(run.dir) / "sweeps" / run.name


def _run_one(planned: Sweep, index: int, nproc: int) -> int:
    """Run one point in this process, as `trainer run` would; the last to finish reports."""
    from ..engine.launch.environment import find_world
    from .run import run

    if index >= len(planned.points):
        count = len(planned.points)
        raise RecipeError(f"--index {index}: the points are 0 to {count - 1}")
    point = planned.points[index]
    try:
        run(planned.recipe, planned.settings(point), nproc=nproc)
    except typer.Exit as end:
        if end.exit_code != ExitCode.DONE:
            return end.exit_code
    if find_world().rank == 0 and all(map(planned.is_finished, planned.points)):
        print(f"all {len(planned.points)} points are finished: {planned.write_report()}")
    return ExitCode.DONE


def _write_array(
    planned: Sweep, grid: list[str], zips: list[str], nproc: int, as_json: bool
) -> None:
    from ..engine.launch.child import trainer_command
    from ..engine.sweep.slurm import array_script

    require_no_secret([*planned.overrides, *grid, *zips])
    planned.write_manifest()
    command = ["sweep", str(planned.recipe), f"--dir={planned.folder}"]
    command += [f"--grid={text}" for text in grid] + [f"--zip={text}" for text in zips]
    command += [f"--set={text}" for text in planned.overrides]
    (planned.folder / "logs").mkdir(exist_ok=True)
    script = planned.write(
        "sweep.sbatch",
        array_script(
            planned.folder.resolve().name,
            len(planned.points),
            nproc,
            os.getcwd(),
            str(planned.folder),
            trainer_command(command),
        ),
    )
    submit = shlex.join(["sbatch", str(script)])
    if as_json:
        print(json.dumps({"command": submit, "points": len(planned.points)}))
    else:
        print(f"{script}: {len(planned.points)} points; now: {submit}")


def _print(planned: Sweep, report: Path | None, as_json: bool) -> None:
    statuses = planned.statuses()
    ordered = sorted(planned.points, key=lambda point: _rank(statuses[point.name]))
    if as_json:
        rows = [
            {"name": point.name, "set": list(point.settings), **_numbers(statuses[point.name])}
            for point in ordered
        ]
        text = str(report) if report else None
        print(json.dumps({"sweep": str(planned.folder), "report": text, "points": rows}, indent=1))
        return
    table: list[tuple[str, ...]] = [("POINT", "STATE", "STEP", "LOSS", "VALIDATION")]
    for point in ordered:
        numbers = _numbers(statuses[point.name])
        cells = (numbers[key] for key in ("state", "step", "loss", "validation_loss"))
        texts = [format(cell, ".5g") if isinstance(cell, float) else cell for cell in cells]
        table.append((point.name, *("" if text is None else str(text) for text in texts)))
    print_table(table)
    if report:
        print(f"report: {report}")


def _rank(status: RunStatus | None) -> tuple[bool, float]:
    """Return what the table is sorted by: the validation loss, else the training loss."""
    if status is None:
        return True, math.inf
    loss = status.loss if status.eval_loss is None else status.eval_loss
    return (True, math.inf) if loss is None or not math.isfinite(loss) else (False, loss)


def _numbers(status: RunStatus | None) -> dict[str, Any]:
    if status is None:
        return {"state": "not started", "step": None, "loss": None, "validation_loss": None}
    numbers = {"step": status.step, "loss": status.loss, "validation_loss": status.eval_loss}
    return {"state": status.state, **plain(numbers)}


@contextmanager
def _stdout_free(wanted: bool) -> Iterator[None]:
    """Let what the runs print go to stderr, so that stdout holds JSON alone."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
