"""`trainer federate`: federated and low-communication training."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import federate_rounds
from .options import AsJson, Overrides, Recipe, check_paths
from .ranks import require_no_job
from .run_ranks import (
    AllowChanged,
    RecipeOrRun,
    RunPlugins,
    launch_ranks,
    rank_command,
    split_keys,
)
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.federated.plan import FederationPlan

app = typer.Typer(no_args_is_help=True, help="Train with clients and a server, in rounds.")
app.add_typer(federate_rounds.app, name="rounds")


@app.command()
def run(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    nproc: Annotated[
        int,
        typer.Option(
            "--nproc",
            min=1,
            max=4096,
            help="processes of one client's plan, or of all clients if they train at once",
        ),
    ] = 1,
    allow_changed: AllowChanged = "",
    plugin: RunPlugins = None,
) -> None:
    """Train in rounds; run the same command again to resume after a stop."""
    from ..engine.checkpoint.find import code_before_training
    from ..engine.federated.carriers.configs import ranks_of_client
    from ..engine.launch.environment import find_world
    from ..engine.launch.signals import StopFlag
    from ..engine.recipe.saved import load_recipe_or_run

    world = find_world()
    require_no_job(world.launcher, nproc)
    ranks = nproc if nproc > 1 else world.world_size
    table = load_recipe_or_run(recipe, overrides or [], None, plugin or []).recipe.federation
    own = ranks_of_client(table, ranks) if table else ranks
    loaded = load_recipe_or_run(recipe, overrides or [], own, plugin or []).recipe
    stop = StopFlag()
    answer = partial(code_before_training, loaded.run.folder, loaded.run.resume)
    stop.end_at_once(answer, abruptly=True)
    with stop:
        if nproc > 1:
            command = rank_command(["federate", "run"], recipe, overrides, allow_changed, plugin)
            raise typer.Exit(launch_ranks(loaded, command, nproc, stop))
        from ..engine.federated.federated_loop import FederatedLoop
        from ..engine.run.run import run as run_recipe

        allowed, loop = split_keys(allow_changed), FederatedLoop()
        raise typer.Exit(run_recipe(loaded, world, allow_changed=allowed, stop=stop, loop=loop))


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
    simulate: Annotated[
        int,
        typer.Option(
            min=0, max=10**6, metavar="ROUNDS", help="simulate rounds with [federation.trace]"
        ),
    ] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="as computed on this machine's CPU")] = False,
    as_json: AsJson = False,
) -> None:
    """Print bytes, time and memory of a round, before anything runs; simulate faults."""
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
        rounds=simulate,
    )
    if as_json:
        print(json.dumps(asdict(costs), indent=1))
    else:
        _print_plan(costs, loaded.federation.rounds or 1, loaded.federation.processes)


@app.command()
@check_paths
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")],
    as_json: AsJson = False,
) -> None:
    """Show the newest round of a run, and each client's newest part in one."""
    from ..engine.federated.follow import read_status
    from ..engine.report.status import examine

    found, state = read_status(run), examine(run).state
    if as_json:
        print(json.dumps({"state": state, **asdict(found)}, indent=1))
        return
    newest = found.round
    rows = [["run", f"{run}: {state}"]]
    if newest:
        rows += [["round", f"{newest['round']}, step {newest['step']}"]]
        rows += [["loss", f"{newest['loss']:.5g}"]]
    traffic = f"{_size(found.bytes_sent)} sent, {_size(found.bytes_received)} received"
    print_table([*rows, ["clients", traffic]])
    cells = [["CLIENT", "ROUNDS", "NEWEST", "LOSS", "NORM", "STATE"]]
    for name, row in found.clients.items():
        count, text = str(found.rounds_of[name]), row.get("rejected") or "late" * ("late" in row)
        loss, norm = f"{row['loss']:.5g}", f"{row['norm']:.4g}"
        cells.append([name, count, str(row["round"]), loss, norm, text or "merged"])
    print_table(cells)


@app.command()
@check_paths
def stop(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")],
    timeout: Annotated[
        float, typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="how long to wait")
    ] = 600.0,
) -> None:
    """Stop a run between two rounds; `trainer federate run` resumes it."""
    from ..engine.federated.follow import stop_run

    echo(f"{run} has stopped" if stop_run(run, timeout) else f"{run} is not running")


def _print_plan(costs: FederationPlan, rounds: int, processes: int) -> None:
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
        *[["worker processes", f"{processes} x {_size(costs.worker_memory)}"]] * (processes > 1),
    ]
    print_table([*rows, *_simulated(costs)])


def _simulated(costs: FederationPlan) -> list[list[str]]:
    """Return the lines of simulated rounds; none without a simulation."""
    if not (found := costs.simulation):
        return []
    return [
        ["simulated", f"{found.rounds:,} rounds in {found.seconds:,.0f} s"],
        ["goodput", f"{found.goodput:.1%} of the clients' time"],
        ["in lock step", f"{found.lock_step_goodput:.1%} if all had to finish each round together"],
        ["merged", f"{found.merged:,} updates, {found.late:,} of an earlier round"],
        ["lost", f"{found.dropped:,} too late, {found.failed:,} failures"],
        ["empty rounds", f"{found.empty_rounds:,}"],
    ]


def _largest(costs: FederationPlan) -> list[list[str]]:
    if costs.largest_sent <= costs.client_sent:
        return []
    return [["at most", f"{_size(costs.largest_sent)} in the round of the largest fragment"]]


def _size(count: int) -> str:
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
