"""`trainer run`: train what a recipe describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .dry_run import describe_dry_run, require_dry_run
from .options import Overrides
from .table import echo

if TYPE_CHECKING:
    from ..engine.launch.signals import StopFlag
    from ..engine.recipe.schema import Recipe as RunRecipe


def run(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="a TOML file; or a run directory or checkpoint, which resumes with its recipe",
        ),
    ],
    overrides: Overrides = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, max=4096, help="processes on this machine")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="build everything, say what would run, train nothing")
    ] = False,
    world_size: Annotated[
        int | None,
        typer.Option("--world", min=1, max=2**20, help="with --dry-run: build the run of N ranks"),
    ] = None,
    allow_changed: Annotated[
        str,
        typer.Option(metavar="KEYS", help="keys that may differ from the checkpoint's, by commas"),
    ] = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            max=1000,
            help="start the ranks of --nproc again after an unforeseen failure, so many times "
            "without a new checkpoint",
        ),
    ] = 0,
    replay: Annotated[
        str,
        typer.Option(
            metavar="EVENT",
            help="compute this step of the run again (an id of events.jsonl, or step:N), and print "
            "norms of activations and gradients by layer",
        ),
    ] = "",
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="Python module to import, which the recipe of a run directory names"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, of --replay")] = False,
) -> None:
    """Train; run the same command again to resume after a stop."""
    from ..engine.checkpoint.find import code_before_training
    from ..engine.core import faults
    from ..engine.launch.environment import find_world
    from ..engine.launch.signals import StopFlag
    from ..engine.recipe.saved import load_recipe_or_run

    if world_size is not None:
        require_dry_run(
            dry_run,
            {
                "--nproc": nproc > 1, "--max-restarts": max_restarts, "--replay": replay,
                "--json": as_json, "--allow-changed": allow_changed,
            },
        )  # fmt: skip
        loaded = load_recipe_or_run(recipe, overrides or [], world_size, plugin or [])
        _warn(loaded.warnings, rank=0)
        describe_dry_run(loaded, world_size)
        return
    world = find_world()
    ranks = nproc if nproc > 1 else world.world_size
    loaded = load_recipe_or_run(recipe, overrides or [], ranks, plugin or [])
    _check_options(world.launcher, nproc, max_restarts, as_json=as_json and not replay)
    _warn(loaded.warnings, world.rank)
    allowed = [key.strip() for key in allow_changed.split(",") if key.strip()]
    if replay:
        if nproc > 1:
            from .replay import launch_replay

            command = _rank_command(recipe, overrides, allow_changed, plugin)
            raise typer.Exit(
                launch_replay([*command, f"--replay={replay}", *["--json"] * as_json], nproc)
            )
        from ..engine.run.replay import replay as replay_step
        from .replay import print_replay

        found = replay_step(loaded.recipe, world, replay, allowed)
        if world.rank == 0:
            print_replay(found, as_json)
        return
    table = loaded.recipe.run
    answer = partial(code_before_training, table.folder, table.resume)
    stop = StopFlag()
    stop.end_at_once(None if dry_run else answer, abruptly=True)
    with stop:
        if nproc > 1:
            command = _rank_command(recipe, overrides, allow_changed, plugin)
            command += ["--dry-run"] * dry_run
            raise typer.Exit(
                _launch(loaded.recipe, command, nproc, max_restarts, stop, dry_run=dry_run)
            )
        faults.point("run.import", world.rank)
        from ..engine.run.run import run as run_recipe

        raise typer.Exit(
            run_recipe(loaded.recipe, world, allow_changed=allowed, dry_run=dry_run, stop=stop)
        )


def _warn(warnings: Sequence[str], rank: int) -> None:
    from ..engine.launch.environment import ATTEMPT

    # A rank that this command started is silent: its parent process has printed them.
    if rank == 0 and ATTEMPT not in os.environ:
        for text in warnings:
            echo(f"warning: {text}", err=True)


def _check_options(launcher: str, nproc: int, max_restarts: int, *, as_json: bool) -> None:
    """Refuse options without the option or the launcher that they belong to."""
    from ..engine.core.errors import RecipeError

    if as_json:
        raise RecipeError(
            "--json belongs to --replay", hint="`trainer status RUN --json` describes a run"
        )
    if nproc > 1 and launcher != "none":
        raise RecipeError(
            f"--nproc {nproc} inside a job of {launcher}",
            hint="leave --nproc out: the job's own processes are the ranks",
        )
    if max_restarts and (launcher != "none" or nproc == 1):
        raise RecipeError(
            "--max-restarts is about the processes that --nproc starts",
            hint="give --nproc 2 or more; elsewhere the launcher of the job restarts it",
        )


def _rank_command(
    recipe: Path, overrides: list[str] | None, allow_changed: str, plugins: list[str] | None
) -> list[str]:
    """Return the arguments of the command line that each rank runs."""
    command = ["run", str(recipe), *(f"--set={text}" for text in overrides or [])]
    command += [f"--plugin={module}" for module in plugins or []]
    return [*command, *[f"--allow-changed={allow_changed}"] * bool(allow_changed)]


def _launch(
    recipe: RunRecipe,
    command: list[str],
    nproc: int,
    max_restarts: int,
    stop: StopFlag,
    *,
    dry_run: bool,
) -> int:
    """Start the ranks on this machine; return the exit code of the job."""
    from ..engine.checkpoint.manifest import MANIFEST
    from ..engine.checkpoint.retention import list_checkpoints, parse_step
    from ..engine.core.run_dir import RunDirectory
    from ..engine.core.run_state import record_failure
    from ..engine.launch.child import trainer_command
    from ..engine.launch.ending import SignalPipe
    from ..engine.launch.failure import Restarts
    from ..engine.launch.local import LAUNCHER_SIGNALS, launch

    directory = RunDirectory(recipe.run.folder)
    if not dry_run:
        with directory:  # rank 0 locks it for good; this finds out before torch is imported
            pass

    def newest_step() -> int | None:
        folders = list_checkpoints(directory.checkpoints) if directory.checkpoints.is_dir() else []
        steps = [parse_step(folder) for folder in folders if (folder / MANIFEST).is_file()]
        return steps[-1] if steps else None

    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        stop.finish()  # it is the ranks that answer now
        return launch(
            trainer_command(command),
            nproc,
            log_dir=directory.logs,
            stop_timeout_seconds=recipe.resilience.stop_timeout_seconds,
            restarts=Restarts(max_restarts, newest_step, ["--set=run.resume=auto"]),
            on_failure=partial(record_failure, directory.path),
            signals=signals,
        )
