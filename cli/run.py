"""`trainer run`: train what a recipe describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides, Recipe


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, max=4096, help="processes on this machine")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="build everything, say what would run, train nothing")
    ] = False,
    allow_changed: Annotated[
        str,
        typer.Option(metavar="KEYS", help="keys that may differ from the checkpoint's, by commas"),
    ] = "",
) -> None:
    """Train; run the same command again to go on after a stop."""
    from ..engine.errors import RecipeError
    from ..engine.launch.environment import find_world
    from ..engine.recipe.load import load_recipe

    world = find_world()
    ranks = nproc if nproc > 1 else world.world_size
    loaded = load_recipe(recipe, overrides or [], world=ranks)
    if nproc > 1 and world.launcher != "none":
        raise RecipeError(
            f"--nproc {nproc} inside a job of {world.launcher}",
            hint="leave --nproc out: the job's own processes are the ranks",
        )
    if nproc > 1:
        from ..engine.launch.child import trainer_command
        from ..engine.launch.local import launch
        from ..engine.run_dir import RunDirectory

        command = ["run", str(recipe), *(f"--set={text}" for text in overrides or [])]
        command += ["--dry-run"] * dry_run
        command += [f"--allow-changed={allow_changed}"] * bool(allow_changed)
        directory = RunDirectory(Path(loaded.recipe.run.dir) / loaded.recipe.run.name)
        if not dry_run:
            with directory:  # rank 0 locks it for good; this finds out before torch is imported
                pass
        code = launch(
            trainer_command(command),
            nproc,
            log_dir=directory.logs,
            stop_timeout_seconds=loaded.recipe.resilience.stop_timeout_seconds,
        )
        raise typer.Exit(code)
    from ..engine.run import run as run_recipe

    allowed = [key.strip() for key in allow_changed.split(",") if key.strip()]
    raise typer.Exit(run_recipe(loaded.recipe, world, allow_changed=allowed, dry_run=dry_run))
