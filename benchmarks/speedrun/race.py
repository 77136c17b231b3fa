"""Runs a row of the speedrun at its stored settings over ten seeds."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import results
import tomli
from measure import MOST_CPU_SECONDS, RECIPES, TARGET, run_row

SEEDS = range(1, 11)
RESULTS = Path(__file__).parents[1] / "results/speedrun.jsonl"

Line = dict[str, Any]
"""one run: the row and its recipe, seed, steps, versions"""


def newest() -> dict[str, list[Line]]:
    """Return the runs of each row at the recipe of the row's last run, one for each seed."""
    lines = list(map(json.loads, RESULTS.read_text().splitlines())) if RESULTS.exists() else []
    recipes = {line["row"]: line["recipe"] for line in lines}
    runs: dict[str, dict[int, Line]] = {row: {} for row in recipes}
    for line in lines:
        if line["recipe"] == recipes[line["row"]]:
            runs[line["row"]][line["seed"]] = line
    return {row: [by_seed[seed] for seed in sorted(by_seed)] for row, by_seed in runs.items()}


def race(row: str, *, is_written: bool) -> Iterator[Line]:
    """Yield the runs of a row; with `is_written`, those that the results have are not run again.

    Raises:
        SystemExit: a run took more CPU time than the rules allow.
    """
    recipe = tomli.loads((RECIPES / f"{row}.toml").read_text())
    same = {"python": platform.python_version(), "target": TARGET, "row": row, "recipe": recipe}
    done = {run["seed"]: run for run in newest().get(row, []) if is_written}
    for seed in SEEDS:
        if seed in done and same.items() <= done[seed].items():
            yield done[seed]
            continue
        outcome = run_row(row, {}, seed)
        if outcome.cpu_seconds > MOST_CPU_SECONDS:
            raise SystemExit(f"{row}: {outcome.cpu_seconds:.0f} CPU seconds are over the limit")
        line = {**same, **asdict(outcome)}
        if is_written:
            results.append("speedrun", line)
        yield line
