"""Runs a command again on several processes of this machine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.core.errors import RecipeError

NumProcesses = Annotated[
    int, typer.Option(min=1, max=4096, help="processes on this machine that share the work")
]


def require_no_job(launcher: str, nproc: int) -> None:
    """Refuse to start ranks in a process that is a rank of a job.

    Args:
        launcher: what started this process; "none": nothing.
        nproc: the number of processes to start; 1: none beside this one.

    Raises:
        RecipeError: this process is a rank of a job already.
    """
    if nproc > 1 and launcher != "none":
        raise RecipeError(
            f"--nproc {nproc} inside a job of {launcher}",
            hint="leave --nproc out: the job's own processes are the ranks",
        )


def run_on_ranks(context: typer.Context, nproc: int) -> None:
    """Run this command on several ranks, and exit with the code of the job; on one, return.

    Args:
        context: the command with its values.
        nproc: the number of processes.

    Raises:
        RecipeError: this process is a rank of a job already.
    """
    from ..engine.launch.environment import find_world

    if nproc == 1:
        return
    require_no_job(find_world().launcher, nproc)
    from tempfile import TemporaryDirectory

    from ..engine.launch.child import trainer_command
    from ..engine.launch.local import launch

    command = trainer_command([str(context.info_name), *_repeat_words(context)])
    with TemporaryDirectory(prefix="trainer-") as logs:
        raise typer.Exit(launch(command, nproc, log_dir=Path(logs)))


def _repeat_words(context: typer.Context) -> list[str]:
    """Return the options and arguments of a command, but for --nproc."""
    options, arguments = list[str](), ["--"]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if value is None or parameter.name == "nproc":
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            arguments += map(str, values)
        elif isinstance(value, bool):
            options += [parameter.opts[0]] * value
        else:
            options += [f"{parameter.opts[0]}={_text(each)}" for each in values]
    return options + arguments


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)
