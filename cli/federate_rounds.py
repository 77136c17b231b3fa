"""`trainer federate rounds`: looks into the rounds of a federation, and exports one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import AsJson, check_paths
from .table import echo, print_table

app = typer.Typer(no_args_is_help=True, help="List, inspect and export the rounds of a run.")

RunPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="a run directory, a checkpoints folder, or one checkpoint"),
]
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
) -> None:
    """Write the global weights of a round as an ordinary checkpoint, for run.init_from."""
    from ..engine.federated.export_round import export_round
    from ..engine.federated.saved_rounds import find_round

    found = find_round(path, number)
    export_round(found.path, target)
    echo(f"round {found.number} exported to {target}")
