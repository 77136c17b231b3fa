"""`trainer report`: one HTML page about runs. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.files import write_asked
from ..engine.report.page import write_page
from ..engine.report.status import find_runs
from .options import AsJson, Force
from .table import echo


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="run directories, or folders of them")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="default: RUN/report.html, or report.html"
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page with plots that needs no network; several runs are compared."""
    folders = find_runs(runs)
    is_default = out is None
    out = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    page = write_page(folders)
    write_asked(out, page, replace=force or is_default, hint="give another file with --out")
    if as_json:
        print(json.dumps({"report": str(out), "runs": [str(run) for run in folders]}))
    else:
        echo(f"{out}: {len(folders)} run{'s' * (len(folders) > 1)}, {len(page) / 1000:,.0f} kB")
