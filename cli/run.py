"""`trainer run`: train what a recipe describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from .dry_run import describe_dry_run, require_dry_run
from .options import Overrides
from .ranks import require_no_job
from .run_ranks import (
    AllowChanged,
    RecipeOrRun,
    RunPlugins,
    launch_ranks,
    rank_command,
    split_keys,
)
from .table import echo

if TYPE_CHECKING:
    from ..engine.recipe.load import Loaded
    from ..engine.recipe.schema import Recipe
    from ..engine.run.run_loop import RunLoop


def run(
    recipe: RecipeOrRun,
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
    allow_changed: AllowChanged = "",
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
    plugin: RunPlugins = None,
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
    loaded = _name_replica(load_recipe_or_run(recipe, overrides or [], ranks, plugin or []))
    _check_options(world.launcher, nproc, max_restarts, as_json=as_json and not replay)
    _warn(loaded.warnings, world.rank)
    allowed = split_keys(allow_changed)
    if replay:
        if nproc > 1:
            from .replay import launch_replay

            command = rank_command(["run"], recipe, overrides, allow_changed, plugin)
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
            command = rank_command(["run"], recipe, overrides, allow_changed, plugin)
            command += ["--dry-run"] * dry_run
            raise typer.Exit(
                launch_ranks(
                    loaded.recipe,
                    command,
                    nproc,
                    stop,
                    max_restarts=max_restarts,
                    dry_run=dry_run,
                )
            )
        faults.point("run.import", world.rank)
        from ..engine.run.run import run as run_recipe

        raise typer.Exit(
            run_recipe(
                loaded.recipe,
                world,
                allow_changed=allowed,
                dry_run=dry_run,
                stop=stop,
                loop=_choose_loop(loaded.recipe),
            )
        )


def _name_replica(loaded: Loaded) -> Loaded:
    """Give a replica group that is a job of its own a run directory of its own."""
    if not loaded.recipe.federation or not loaded.recipe.federation.is_elastic:
        return loaded
    from ..engine.federated.elastic.replica import name_replica

    return replace(loaded, recipe=name_replica(loaded.recipe))


def _choose_loop(recipe: Recipe) -> RunLoop | None:
    """Return the loop of a federation whose clients are replica groups; None: the usual one."""
    if not recipe.federation or not recipe.federation.is_job:
        return None
    from ..engine.federated.federated_loop import FederatedLoop

    return FederatedLoop(is_job=True)


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
    require_no_job(launcher, nproc)
    if max_restarts and (launcher != "none" or nproc == 1):
        raise RecipeError(
            "--max-restarts is about the processes that --nproc starts",
            hint="give --nproc 2 or more; elsewhere the launcher of the job restarts it",
        )
