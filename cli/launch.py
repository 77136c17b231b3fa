"""`trainer launch`: how to start a run on a cluster. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
import socket
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import RecipeError
from ..engine.core.files import write_asked
from ..engine.core.text.display import format_value
from ..engine.launch.cluster import (
    SECONDS_TO_SAVE,
    batch_script,
    require_one_line,
    require_time,
    torchrun_commands,
)
from ..engine.recipe.load import load_recipe
from ..engine.recipe.schema import Recipe as RecipeModel
from .options import Force, Overrides, Recipe, require_no_secret
from .table import echo

app = typer.Typer(no_args_is_help=True, help="Write what starts a run on a cluster.")

Nodes = Annotated[int, typer.Option("--nodes", min=1, max=65_536, help="machines")]
GPUs = Annotated[
    int, typer.Option("--gpus-per-node", min=1, max=64, help="of each machine; a rank on each")
]


@app.command()
def slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus: GPUs = 8,
    time: Annotated[
        str, typer.Option(help="time limit, such as 12:00:00 or 2-00:00:00; default: the cluster's")
    ] = "",
    partition: Annotated[str, typer.Option(help="where to run; several by commas")] = "",
    account: Annotated[str, typer.Option(help="who pays")] = "",
    requeue: Annotated[
        bool, typer.Option(help="submit the job again when its time is over, to resume")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write it here, and say so")
    ] = None,
    force: Force = False,
) -> None:
    """Write a batch script for sbatch; the recipe is checked for that many ranks first."""
    require_no_secret(overrides or [])
    checked = load_recipe(recipe, overrides or [], nodes * gpus).recipe
    options: dict[str, str | int] = {
        "job-name": checked.run.name,
        "nodes": nodes,
        "ntasks-per-node": gpus,
        "gpus-per-node": gpus,
        "chdir": os.getcwd(),
        "output": f"{checked.run.name}-%j.out",
    }
    if time:
        require_time(time)
        options["time"] = time
    for name, value in (("partition", partition), ("account", account)):
        if value:
            options[name] = _word(f"--{name}", value)
    if requeue:
        _require_resume(checked)
    from ..engine.launch.child import trainer_command

    command = trainer_command(_arguments(recipe, overrides))
    text = batch_script(options, shlex.join(command), _notes(requeue), requeue=requeue)
    if output is None:
        print(text, end="")
    else:
        write_asked(output, text, replace=force)
        echo(f"{output}: {nodes * gpus} ranks; now: {shlex.join(['sbatch', str(output)])}")


@app.command()
def torchrun(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus: GPUs = 8,
    host: Annotated[
        str, typer.Option(help="the first machine, as the others reach it; default: this one")
    ] = "",
    port: Annotated[int, typer.Option(min=1024, max=65_535, help="free there")] = 29_400,
) -> None:
    """Print each machine's torchrun command; the recipe is checked for that many ranks first."""
    load_recipe(recipe, overrides or [], nodes * gpus)
    host = _word("--host", host or socket.gethostname())
    arguments = [require_one_line(each) for each in _arguments(recipe, overrides)]
    for number, command in enumerate(torchrun_commands(nodes, gpus, host, port, arguments)):
        print(f"# machine {number}\n{command}")


def _arguments(recipe: Path, overrides: list[str] | None) -> list[str]:
    return ["run", str(recipe), *(f"--set={text}" for text in overrides or [])]


def _word(option: str, value: str) -> str:
    if not re.fullmatch(r"\w[\w.,@-]{0,254}", value, re.ASCII):
        message = f"{option} {format_value(value)} is no name"
        raise RecipeError(message, "letters, digits, `.`, `,`, `_`, `@` and `-` can be in it")
    return value


def _require_resume(recipe: RecipeModel) -> None:
    if recipe.run.resume != "auto":
        raise RecipeError(
            f"run.resume is {format_value(recipe.run.resume)}: each turn would start there again",
            'set run.resume = "auto", or give --no-requeue',
        )


def _notes(requeue: bool) -> list[str]:
    then = "is queued again, to resume from there" if requeue else "ends with exit code 75"
    return [
        "What your cluster wants besides goes here or on the command line of sbatch.",
        f"SIGTERM comes {SECONDS_TO_SAVE} s before the time limit: the run saves, and {then}.",
    ]
