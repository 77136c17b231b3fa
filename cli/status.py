"""`trainer status`: what runs are doing. Imports no torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.observe.metrics import replace_non_finite
from ..engine.report.status import RunStatus, clock, examine, find_runs
from .options import AsJson
from .table import print_table

LARGEST = 1e300
BARS = "▁▂▃▄▅▆▇█"
CLEAR = "\x1b[H\x1b[2J"


def status(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run directories")],
    watch: Annotated[bool, typer.Option("--watch", help="again and again, while any runs")] = False,
    seconds: Annotated[
        float, typer.Option("--every", min=1.0, max=3600.0, help="seconds between two looks")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show what a run is doing, or how it ended."""
    while True:
        statuses = [examine(path) for path in find_runs(runs)]
        if watch and sys.stdout.isatty() and not as_json:
            print(CLEAR, end="")
        _print(statuses, as_json, indent=None if watch else 1)
        if not watch or not any(each.state == "running" for each in statuses):
            return
        sys.stdout.flush()
        time.sleep(seconds)


def _print(statuses: Sequence[RunStatus], as_json: bool, indent: int | None) -> None:
    if as_json:
        rows = [_plain(each) for each in statuses]
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=indent))
    elif len(statuses) == 1:
        print_table(list(_lines(statuses[0]).items()))
    else:
        _print_table(statuses)


def _plain(one: RunStatus) -> dict[str, Any]:
    return replace_non_finite(asdict(replace(one, losses=one.losses[-40:])))  # type: ignore[no-any-return]


def _lines(one: RunStatus) -> dict[str, str]:
    """Return what is known of one run, a line each."""
    lines = {"run": one.run, "state": _state(one), "step": _step(one)}
    if one.loss is not None:
        lines["loss"] = f"{one.loss:.5g}  {sparkline(one.losses)}"
    if one.eval_loss is not None:
        lines["validation"] = f"{one.eval_loss:.5g} at step {one.eval_step:,}"
    if one.tokens_per_second is not None:
        lines["tokens/s"] = f"{one.tokens_per_second:,.0f}"
    if one.eta_seconds is not None:
        lines["eta"] = clock(one.eta_seconds)
    lines["checkpoint"] = _checkpoint(one)
    if one.last_sign_seconds is not None:
        lines["last sign"] = f"{clock(one.last_sign_seconds)} ago"
    if one.behind:
        lines["ranks"] = f"furthest behind: {one.behind}"
    if one.events:
        lines["events"] = f"{one.events:,}, the newest {one.newest_event}"
    lines["attempts"] = str(one.attempts)
    lines["disk"] = f"{one.disk_bytes / 2**20:,.1f} MiB"
    return lines | ({"warnings": "; ".join(one.warnings)} if one.warnings else {})


def _print_table(statuses: Sequence[RunStatus]) -> None:
    from ..engine.report.runs import names_of

    rows = [("RUN", "STATE", "STEP", "LOSS", "VALIDATION", "TOK/S", "ETA", "CHECKPOINT", "NOTES")]
    for name, one in zip(names_of([Path(each.run) for each in statuses]), statuses, strict=True):
        rows.append(
            (
                name,
                one.state,
                _step(one),
                _number(one.loss, ".5g"),
                _number(one.eval_loss, ".5g"),
                _number(one.tokens_per_second, ",.0f"),
                "" if one.eta_seconds is None else clock(one.eta_seconds),
                _checkpoint(one),
                "; ".join([*one.warnings, *filter(None, [one.reason])]),
            )
        )
    print_table(rows)


def _state(one: RunStatus) -> str:
    if one.state == "running":
        return f"running: {one.holder}"
    if one.state == "died":
        return "died: it was killed, or its machine went down; run it again to resume"
    if one.state == "stopped":
        return "stopped, saved; run it again to resume"
    return f"failed: {one.reason}" if one.state == "failed" else one.state


def _step(one: RunStatus) -> str:
    if not one.total_steps:
        return f"{one.step:,}"
    return f"{one.step:,} of {one.total_steps:,} ({one.step / one.total_steps:.0%})"


def _checkpoint(one: RunStatus) -> str:
    if one.checkpoint_step is None:
        return "none"
    return f"step {one.checkpoint_step:,}, {clock(one.checkpoint_age_seconds or 0)} ago"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the newest values as a row of bars; those that are not finite as gaps."""
    shown = [value if abs(value) < LARGEST else None for value in values[-width:]]
    finite = [value for value in shown if value is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[round((value - low) * scale)] for value in shown)
