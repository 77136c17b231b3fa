"""`trainer federate`: federated and low-communication training."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import federate_rounds
from .options import AsJson, Overrides, Recipe
from .table import print_table

if TYPE_CHECKING:
    from ..engine.federated.plan import FederationPlan
    from ..engine.launch.signals import StopFlag
    from ..engine.recipe.schema import Recipe as RunRecipe

app = typer.Typer(no_args_is_help=True, help="Train with clients and a server, in rounds.")
app.add_typer(federate_rounds.app, name="rounds")


@app.command()
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
        int, typer.Option("--nproc", min=1, max=4096, help="processes of one client's plan")
    ] = 1,
    allow_changed: Annotated[
        str,
        typer.Option(metavar="KEYS", help="keys that may differ from the checkpoint's, by commas"),
    ] = "",
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="Python module to import, which the recipe of a run directory names"),
    ] = None,
) -> None:
    """Train in rounds; run the same command again to resume after a stop."""
    from ..engine.checkpoint.find import code_before_training
    from ..engine.core.errors import RecipeError
    from ..engine.launch.environment import find_world
    from ..engine.launch.signals import StopFlag
    from ..engine.recipe.saved import load_recipe_or_run

    world = find_world()
    if nproc > 1 and world.launcher != "none":
        raise RecipeError(
            f"--nproc {nproc} inside a job of {world.launcher}",
            hint="leave --nproc out: the job's own processes are the ranks",
        )
    ranks = nproc if nproc > 1 else world.world_size
    loaded = load_recipe_or_run(recipe, overrides or [], ranks, plugin or []).recipe
    stop = StopFlag()
    answer = partial(code_before_training, loaded.run.folder, loaded.run.resume)
    stop.end_at_once(answer, abruptly=True)
    with stop:
        if nproc > 1:
            words = ["federate", "run", str(recipe), *(f"--set={text}" for text in overrides or [])]
            words += [f"--plugin={module}" for module in plugin or []]
            words += [f"--allow-changed={allow_changed}"] * bool(allow_changed)
            raise typer.Exit(_launch(loaded, words, nproc, stop))
        from ..engine.federated.federated_loop import FederatedLoop
        from ..engine.run.run import run as run_recipe

        allowed = [key.strip() for key in allow_changed.split(",") if key.strip()]
        loop = FederatedLoop()
        raise typer.Exit(run_recipe(loaded, world, allow_changed=allowed, stop=stop, loop=loop))


def _launch(recipe: RunRecipe, words: list[str], nproc: int, stop: StopFlag) -> int:
    """Start the ranks on this machine; return the exit code of the job."""
    from ..engine.core.run_dir import RunDirectory
    from ..engine.core.run_state import record_failure
    from ..engine.launch.child import trainer_command
    from ..engine.launch.ending import SignalPipe
    from ..engine.launch.local import LAUNCHER_SIGNALS, launch

    directory = RunDirectory(recipe.run.folder)
    with directory:  # rank 0 locks it for good; this finds out before torch is imported
        pass
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        stop.finish()  # it is the ranks that answer now
        return launch(
            trainer_command(words),
            nproc,
            log_dir=directory.logs,
            stop_timeout_seconds=recipe.resilience.stop_timeout_seconds,
            on_failure=partial(record_failure, directory.path),
            signals=signals,
        )


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, max=2**20, help="ranks of one client's plan")] = 1,
    bandwidth: Annotated[
        float, typer.Option(min=0.0, metavar="MBIT", help="Mbit/s of each client's link")
    ] = 0.0,
    step_seconds: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="duration of an optimizer step")
    ] = 0.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="as computed on this machine's CPU")] = False,
    as_json: AsJson = False,
) -> None:
    """Print bytes, time and memory of a round, before anything runs."""
    from ..engine.core.errors import Problem, RecipeError
    from ..engine.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or [], world).recipe
    if loaded.federation is None:
        raise RecipeError([Problem("the recipe has no such table", key="federation")])
    from ..engine.federated.plan import plan_federation

    costs = plan_federation(
        loaded,
        loaded.federation,
        world,
        on_gpu=not cpu,
        bandwidth=bandwidth * 1e6,
        step_seconds=step_seconds,
    )
    if as_json:
        print(json.dumps(asdict(costs), indent=1))
    else:
        _print_plan(costs, loaded.federation.rounds)


def _print_plan(costs: FederationPlan, rounds: int) -> None:
    total = costs.client_sent + costs.client_received
    rows = [
        ["trained weights", f"{costs.weights:,}"],
        ["averaged buffers", f"{costs.buffers:,}"],
        ["a round", f"{costs.clients} clients x {costs.local_steps} steps"],
        ["a client sends", f"{_size(costs.client_sent)} a round"],
        *_largest(costs),
        ["a client receives", f"{_size(costs.client_received)} a round"],
        ["the server receives", f"{_size(costs.client_sent * costs.clients)} a round"],
        ["the server sends", f"{_size(costs.client_received * costs.clients)} a round"],
        ["all rounds", f"{_size(total * costs.clients * rounds)} over all links"],
        ["data parallel", f"{_size(costs.data_parallel)} a client in as many steps"],
    ]
    if total:
        rows.append(["less traffic", f"{costs.data_parallel / total:.1f} times"])
    if costs.transfer_seconds:
        rows.append(["transfers", f"{costs.transfer_seconds:.3g} s a round, not overlapped"])
    if costs.compute_seconds:
        share = costs.compute_seconds / (costs.compute_seconds + costs.transfer_seconds)
        rows.append(["training", f"{costs.compute_seconds:.3g} s a round, {share:.1%} of the time"])
    rows += [
        ["memory of a client's rank", _size(costs.client_memory)],
        ["memory of the server", f"{_size(costs.server_memory)} a rank"],
        ["states of other clients", f"{_size(costs.kept_memory)} a rank"],
    ]
    print_table(rows)


def _largest(costs: FederationPlan) -> list[list[str]]:
    if costs.largest_sent <= costs.client_sent:
        return []
    return [["at most", f"{_size(costs.largest_sent)} in the round of the largest fragment"]]


def _size(count: int) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
