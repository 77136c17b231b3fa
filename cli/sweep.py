"""`trainer sweep`: several runs of one recipe. Imports no torch, but for `--index`."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.core.errors import ExitCode, RecipeError
from ..engine.observe.metrics import replace_non_finite
from ..engine.recipe.load import load_recipe
from ..engine.report.status import RunStatus
from ..engine.sweep.folder import Sweep
from ..engine.sweep.points import Point, make_points
from .options import AsJson, Overrides, Recipe, require_no_secret
from .table import echo, print_table

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
        Path | None, typer.Option("--dir", help="default: sweeps/{run.name} beside the run")
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
        int | None, typer.Option("--index", min=0, max=2**31, help="run this point alone, from 0")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe at each point of a grid; the same command again resumes after a stop."""
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
    return run.folder.parent / "sweeps" / run.name


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
        echo(f"all {len(planned.points)} points are finished: {planned.write_report()}")
    return ExitCode.DONE


def _write_array(
    planned: Sweep, grid: list[str], zips: list[str], nproc: int, as_json: bool
) -> None:
    from ..engine.launch.child import trainer_command
    from ..engine.sweep.runner import array_script

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
        echo(f"{script}: {len(planned.points)} points; now: {submit}")


def _print(planned: Sweep, report: Path | None, as_json: bool) -> None:
    statuses = planned.statuses()
    ordered, note = _ordered(planned.points, statuses)
    if as_json:
        rows = [
            {"name": point.name, "set": list(point.settings), **_numbers(statuses[point.name])}
            for point in ordered
        ]
        text = str(report) if report else None
        print(json.dumps({"sweep": str(planned.folder), "report": text, "points": rows}, indent=1))
        return
    columns = {"state": "STATE", "step": "STEP", "loss": "LOSS", "validation_loss": "VALIDATION"}
    if _varies_tokenizer(ordered):
        columns["bits_per_byte"] = "BITS/BYTE"
    table: list[tuple[str, ...]] = [("POINT", *columns.values())]
    for point in ordered:
        numbers = _numbers(statuses[point.name])
        cells = (numbers[key] for key in columns)
        texts = [format(cell, ".5g") if isinstance(cell, float) else cell for cell in cells]
        table.append((point.name, *("" if text is None else str(text) for text in texts)))
    print_table(table)
    if note:
        echo(note)
    if report:
        echo(f"report: {report}")


def _varies_tokenizer(points: Sequence[Point]) -> bool:
    keys = (setting.partition("=")[0] for point in points for setting in point.settings)
    return any(key.split(".")[0] == "tokenizer" for key in keys)


def _ordered(
    points: Sequence[Point], statuses: Mapping[str, RunStatus | None]
) -> tuple[list[Point], str]:
    """Return the points, the best first, and what to say about their order.

    They are sorted by the validation loss, else by the training loss. Where tokenizers differ, a
    token of one is not a token of another: then by bits per byte, if every evaluation has them.
    """
    if not _varies_tokenizer(points):
        return sorted(points, key=lambda point: _rank(statuses[point.name], _loss)), ""
    started = [status for status in statuses.values() if status and _loss(status) is not None]
    if any(status.eval_bits_per_byte is None for status in started):
        return list(points), (
            "the tokenizers differ, and not every run has evaluations with bits per byte: the "
            "losses cannot be compared, and the points stand in their own order"
        )
    ordered = sorted(
        points, key=lambda point: _rank(statuses[point.name], lambda each: each.eval_bits_per_byte)
    )
    return ordered, "the tokenizers differ: sorted by bits per byte"


def _loss(status: RunStatus) -> float | None:
    return status.loss if status.eval_loss is None else status.eval_loss


def _rank(
    status: RunStatus | None, measure: Callable[[RunStatus], float | None]
) -> tuple[bool, float]:
    """Return a key to sort by; what has no number, or one that is not finite, comes last."""
    value = None if status is None else measure(status)
    return (True, math.inf) if value is None or not math.isfinite(value) else (False, value)


def _numbers(status: RunStatus | None) -> dict[str, Any]:
    if status is None:
        names = ("step", "loss", "validation_loss", "bits_per_byte")
        return {"state": "not started", **dict.fromkeys(names)}
    numbers = {
        "step": status.step,
        "loss": status.loss,
        "validation_loss": status.eval_loss,
        "bits_per_byte": status.eval_bits_per_byte,
    }
    return {"state": status.state, **replace_non_finite(numbers)}


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
