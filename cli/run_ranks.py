"""What `trainer run` and `trainer federate run` share: options, and the ranks of `--nproc`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..engine.launch.signals import StopFlag
    from ..engine.recipe.schema import Recipe

RecipeOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="a TOML file; or a run directory or checkpoint, which resumes with its recipe",
    ),
]
AllowChanged = Annotated[
    str,
    typer.Option(metavar="KEYS", help="keys that may differ from the checkpoint's, by commas"),
]
RunPlugins = Annotated[
    list[str] | None,
    typer.Option(help="Python module to import, which the recipe of a run directory names"),
]


def split_keys(allow_changed: str) -> list[str]:
    """Return the keys of `--allow-changed`."""
    return [key.strip() for key in allow_changed.split(",") if key.strip()]


def rank_command(
    command: Sequence[str],
    recipe: Path,
    overrides: list[str] | None,
    allow_changed: str,
    plugins: list[str] | None,
) -> list[str]:
    """Return the arguments of the command line that each rank runs."""
    words = [*command, str(recipe), *(f"--set={text}" for text in overrides or [])]
    words += [f"--plugin={module}" for module in plugins or []]
    return [*words, *[f"--allow-changed={allow_changed}"] * bool(allow_changed)]


def launch_ranks(
    recipe: Recipe,
    command: list[str],
    nproc: int,
    stop: StopFlag,
    *,
    max_restarts: int = 0,
    dry_run: bool = False,
) -> int:
    """Start the ranks of a run on this machine; return the exit code of the job.

    Args:
        recipe: the recipe of the run.
        command: what `rank_command` returned.
        nproc: number of ranks.
        stop: listens to signals until the ranks do.
        max_restarts: how often the ranks are started again without a new checkpoint.
        dry_run: leave the run directory unlocked.
    """
    from ..engine.checkpoint.manifest import MANIFEST
    from ..engine.checkpoint.retention import list_checkpoints, parse_step
    from ..engine.core.run_dir import RunDirectory
    from ..engine.core.run_state import record_failure
    from ..engine.launch.child import trainer_command
    from ..engine.launch.ending import SignalPipe
    from ..engine.launch.failure import Restarts
    from ..engine.launch.local import LAUNCHER_SIGNALS, launch
    from ..engine.run.hub_pins import list_hub_ids, pin_hub_ids

    # Once for all ranks: a branch may move between two questions.
    pins = [f"--set={table}.{key}={pin}" for table, key, pin in list_hub_ids(pin_hub_ids(recipe))]
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
            trainer_command([*command, *pins]),
            nproc,
            log_dir=directory.logs,
            stop_timeout_seconds=recipe.resilience.stop_timeout_seconds,
            restarts=Restarts(max_restarts, newest_step, ["--set=run.resume=auto"]),
            on_failure=partial(record_failure, directory.path),
            signals=signals,
        )
