"""`trainer federate rounds`: looks into the rounds of a federation, and exports one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.core.errors import ExitCode, RecipeError
from .options import AsJson, check_paths
from .table import echo, print_table

app = typer.Typer(
    no_args_is_help=True,
    help="Look after the rounds of a run.",
)

RunPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="a run directory, a checkpoints folder, or one checkpoint"),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
Number = Annotated[
    int, typer.Option("--round", help="number of a round; negative: from the end, -1 the newest")
]


@app.command("list")
@check_paths
def list_rounds(path: RunPath, as_json: AsJson = False) -> None:
    """List the rounds on the disk, oldest first; names and sizes of their files are checked."""
    from ..engine.federated import saved_rounds

    rows: list[dict[str, Any]] = [
        {
            "round": each.number,
            "step": each.manifest.step,
            "clients": len(each.clients),
            "contents": each.manifest.contents,
            "bytes": each.manifest.bytes,
            "saved_at": each.manifest.saved_at,
            "problems": each.problems,
            "path": str(each.path),
        }
        for each in saved_rounds.list_rounds(path)
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    cells = [["ROUND", "STEP", "CLIENTS", "CONTENTS", "MB", "SAVED", "STATE"]]
    for row in rows:
        words = [str(row[key]) for key in ("round", "step", "clients", "contents")]
        state = "; ".join(row["problems"]) or "complete"
        cells.append([*words, f"{row['bytes'] / 1e6:.2f}", row["saved_at"], state])
    print_table(cells)


@app.command()
@check_paths
def inspect(path: RunPath, number: Number = -1, as_json: AsJson = False) -> None:
    """Show a round: the place of each client, and the tensors of server and clients."""
    from ..engine.federated.saved_rounds import find_round

    found = find_round(path, number)
    tensors: dict[str, int] = {}
    for name in found.manifest.tensors:
        section = name.partition(".")[0]
        tensors[section] = tensors.get(section, 0) + 1
    if as_json:
        content = {"path": str(found.path), "round": found.number, "step": found.manifest.step}
        print(json.dumps({**content, "clients": found.clients, "tensors": tensors}, indent=1))
        return
    echo(f"round {found.number}, step {found.manifest.step}: {found.path}")
    print_table(
        [
            ["CLIENT", "STEPS"],
            *([str(each.get("name")), str(each.get("batch"))] for each in found.clients),
        ]
    )
    print_table([["TENSORS", "COUNT"], *([name, str(count)] for name, count in tensors.items())])


@app.command()
@check_paths
def export(
    path: RunPath,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="folder of the checkpoint")],
    number: Number = -1,
    with_moments: Annotated[
        bool,
        typer.Option(
            "--with-moments", help="with the mean of the clients' optimizer states, to resume from"
        ),
    ] = False,
) -> None:
    """Write the global weights of a round as an ordinary checkpoint, for run.init_from."""
    from ..engine.federated.export_round import export_round
    from ..engine.federated.saved_rounds import find_round

    found = find_round(path, number)
    export_round(found.path, target, with_moments=with_moments)
    echo(f"round {found.number} exported to {target}")


@app.command()
@check_paths
def validate(path: RunPath, as_json: AsJson = False) -> None:
    """Read every byte of all rounds, and compare their states; exit code 5 if anything is wrong."""
    from ..engine.federated.change_rounds import find_problems
    from ..engine.federated.saved_rounds import list_rounds

    found = {each.number: find_problems(each) for each in list_rounds(path)}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        rows = [[str(number), "; ".join(problems) or "valid"] for number, problems in found.items()]
        print_table([["ROUND", "STATE"], *rows])
    if any(found.values()):
        raise typer.Exit(ExitCode.CHECKPOINT)


@app.command()
@check_paths
def edit(
    run: RunDir,
    number: Number = -1,
    set_round: Annotated[
        int | None, typer.Option(min=1, max=2**40, help="new number of the round")
    ] = None,
    reset_client: Annotated[
        list[str] | None, typer.Option(help="client that starts again with empty states")
    ] = None,
) -> None:
    """Change a round, from which the run then resumes; the original stays as a backup."""
    from ..engine.federated.change_rounds import edit_round
    from ..engine.federated.saved_rounds import find_round

    if set_round is None and not reset_client:
        raise RecipeError("nothing to change", "give --set-round or --reset-client")
    edited, backup = edit_round(run, find_round(run, number), set_round, reset_client or [])
    echo(f"{edited}; the original is {backup}")


@app.command()
@check_paths
def branch(
    run: RunDir,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="run directory to make")],
    number: Number = -1,
) -> None:
    """Start another run from a round; `trainer federate run OUT` resumes it."""
    from ..engine.federated.change_rounds import branch_round
    from ..engine.federated.saved_rounds import find_round

    found = find_round(run, number)
    branch_round(run, found, target)
    echo(f"{target} resumes from round {found.number}")


@app.command()
@check_paths
def prune(
    path: RunPath,
    keep: Annotated[int, typer.Option(min=1, max=2**53, help="how many intact rounds stay")],
) -> None:
    """Delete all but the newest intact rounds; the last intact one always stays."""
    from ..engine.federated.change_rounds import prune_rounds

    for each in prune_rounds(path, keep):
        echo(f"removed {each}")
