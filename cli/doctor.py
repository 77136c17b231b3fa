"""`trainer doctor`: what this machine has, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..engine.errors import ExitCode
from .options import AsJson
from .table import print_table


def doctor(
    runs: Annotated[Path, typer.Option(help="the folder where runs are kept")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, process groups, kernels and disk; exit 3 if runs would fail."""
    from ..engine.doctor import examine

    findings = list(examine(runs))
    healthy = all(finding.state != "bad" for finding in findings)
    if as_json:
        report = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    else:
        rows = []
        for finding in findings:
            text = f"{finding.text}; {finding.hint}" if finding.hint else finding.text
            rows.append((finding.state, finding.subject, text))
        print_table(rows)
    raise typer.Exit(ExitCode.DONE if healthy else ExitCode.ENVIRONMENT)
