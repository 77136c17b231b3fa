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
from ..engine.launch.kubernetes import NAME, SHARED_MEMORY, Pods, job_set, resource_name, to_yaml
from ..engine.recipe.assets import find_missing_assets
from ..engine.recipe.load import load_recipe
from ..engine.recipe.schema import Recipe as RecipeModel
from .options import Force, Offline, Overrides, Recipe, require_no_secret
from .table import echo, print_warnings

app = typer.Typer(no_args_is_help=True, help="Write what starts a run on a cluster.")

Nodes = Annotated[int, typer.Option("--nodes", min=1, max=65_536, help="machines")]
GPUs = Annotated[
    int, typer.Option("--gpus-per-node", min=1, max=64, help="of each machine; a rank on each")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write it here, and say so")]
RESERVED = ("open-mode", "requeue", "no-requeue", "signal", "time", "partition", "account")
"""options of sbatch that have an option here, or that a resumed run depends on"""


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
    cpus: Annotated[
        int,
        typer.Option("--cpus-per-task", min=0, help="cores of a rank; 0: the cluster's default"),
    ] = 0,
    container: Annotated[
        str,
        typer.Option(
            metavar="IMAGE", help="run in this container (srun's --container-image: Pyxis)"
        ),
    ] = "",
    mounts: Annotated[
        str, typer.Option(metavar="FROM:TO,...", help="folders in the container besides this one")
    ] = "",
    directive: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="another option of sbatch, such as qos=high"),
    ] = None,
    output: Output = None,
    force: Force = False,
    offline: Offline = False,
) -> None:
    """Write a batch script for sbatch; the recipe is checked for that many ranks first."""
    checked = _load(recipe, overrides, nodes * gpus, offline)
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
    if cpus:
        options["cpus-per-task"] = cpus
    for text in directive or []:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or name in (*options, *RESERVED):
            hint = "NAME=VALUE or NAME, of an option that this command does not write itself"
            raise RecipeError(f"--directive {format_value(text)}", hint)
        options[name] = value
    if requeue:
        _require_resume(checked)
    srun = [f"--cpus-per-task={cpus}"] * bool(cpus)  # srun does not take it from sbatch
    if container:
        here = os.getcwd()
        folders = ",".join(filter(None, [f"{here}:{here}", mounts]))
        srun += [f"--container-image={container}", f"--container-workdir={here}"]
        srun += [f"--container-mounts={folders}"]
        command = ["trainer", *_arguments(recipe, overrides)]
    elif mounts:
        raise RecipeError("--mounts is about a container", "name one with --container")
    else:
        from ..engine.launch.child import trainer_command

        command = trainer_command(_arguments(recipe, overrides))
    text = batch_script(
        options, shlex.join(command), _notes(requeue), requeue=requeue, srun=shlex.join(srun)
    )
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
    loaded = load_recipe(recipe, overrides or [], nodes * gpus)
    print_warnings(find_missing_assets(loaded))
    host = _word("--host", host or socket.gethostname())
    arguments = [require_one_line(each) for each in _arguments(recipe, overrides)]
    for number, command in enumerate(torchrun_commands(nodes, gpus, host, port, arguments)):
        print(f"# machine {number}\n{command}")


@app.command()
def kubernetes(
    recipe: Recipe,
    image: Annotated[str, typer.Option(help="container image that has this package")],
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus: GPUs = 8,
    cpus: Annotated[int, typer.Option(min=0, help="cores of a pod; 0: the cluster's default")] = 0,
    memory: Annotated[str, typer.Option(help="memory of a pod, such as 512Gi")] = "",
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:PATH", help="persistent volume claim, and where it appears"),
    ] = None,
    folder: Annotated[str, typer.Option("--workdir", help="working directory")] = "/workspace",
    namespace: Annotated[str, typer.Option(help="where it is created")] = "",
    max_restarts: Annotated[
        int, typer.Option(min=0, max=1000, help="how often all pods are started again")
    ] = 10,
    output: Output = None,
    force: Force = False,
    offline: Offline = False,
) -> None:
    """Write a JobSet for kubectl; the recipe is checked for that many ranks first."""
    checked = _load(recipe, overrides, nodes * gpus, offline)
    if max_restarts:
        _require_resume(checked)
    claims: dict[str, str] = {}
    for text in volume or []:
        claim, _, path = text.partition(":")
        path = path if path == "/" else path.rstrip("/")
        if not path.startswith("/") or path in (*claims, SHARED_MEMORY):
            hint = "such as corpus:/workspace, each path once"
            raise RecipeError(f"--volume {format_value(text)}", hint)
        claims[path] = _object_name("--volume", claim)
    if memory and not re.fullmatch(r"[1-9]\d{0,9}(Ki|Mi|Gi|Ti|k|M|G|T)?", memory):
        raise RecipeError(f"--memory {format_value(memory)} is no size", "such as 512Gi")
    if not image or re.search(r"\s", image):
        raise RecipeError(f"--image {format_value(image)} is no image", "such as team/trainer:1")
    if not folder.startswith("/"):
        raise RecipeError(f"--workdir {format_value(folder)} is no absolute path", "/workspace")
    pods = Pods(require_one_line(image), nodes, gpus, cpus, memory, claims, folder)
    name = resource_name(checked.run.name)
    namespace = namespace and _object_name("--namespace", namespace)
    arguments = [require_one_line(each) for each in _arguments(recipe, overrides)]
    manifest = job_set(name, namespace, pods, arguments, max_restarts)
    if output is None:
        print(to_yaml(manifest), end="")
    else:
        write_asked(output, to_yaml(manifest), replace=force)
        ranks = f"{nodes * gpus} ranks in {nodes} pods"
        echo(f"{output}: {ranks}; now: {shlex.join(['kubectl', 'apply', '-f', str(output)])}")


def _load(recipe: Path, overrides: list[str] | None, ranks: int, offline: bool) -> RecipeModel:
    """Load a recipe for a number of ranks; warn about files that it reads and that do not exist."""
    require_no_secret(overrides or [])
    loaded = load_recipe(recipe, overrides or [], ranks)
    missing = find_missing_assets(loaded, offline=offline)
    if offline and missing:
        raise RecipeError(missing)
    print_warnings(missing)
    return loaded.recipe


def _object_name(option: str, text: str) -> str:
    if not NAME.fullmatch(text):
        hint = "small letters, digits, `-` and `.`, the first and last a letter or digit"
        raise RecipeError(f"{option} {format_value(text)} is no name in Kubernetes", hint)
    return text


def _arguments(recipe: Path, overrides: list[str] | None) -> list[str]:
    return ["run", str(recipe), *(f"--set={text}" for text in overrides or [])]


def _word(option: str, value: str) -> str:
    if not re.fullmatch(r"\w[\w.,@-]{0,254}", value, re.ASCII):
        message = f"{option} {format_value(value)} is no name"
        raise RecipeError(message, "letters, digits, `.`, `,`, `_`, `@` and `-` can be in it")
    return value


def _require_resume(recipe: RecipeModel) -> None:
    if recipe.run.resume == "never":
        raise RecipeError(
            'run.resume is "never": the turns after the first would be refused',
            'set run.resume = "auto", or give --no-requeue',
        )


def _notes(requeue: bool) -> list[str]:
    then = "is queued again, to resume from there" if requeue else "ends with exit code 75"
    return [
        "What your cluster wants besides goes here or on the command line of sbatch.",
        f"SIGTERM comes {SECONDS_TO_SAVE} s before the time limit: the run saves, and {then}.",
    ]
