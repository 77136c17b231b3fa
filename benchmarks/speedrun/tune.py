"""Tunes the rows of the speedrun, each with the same number of trials."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli
from measure import RECIPES, run_row

TRIALS, WIDE_TRIALS = 8, 5
FIRST_LENGTH = 160
SEED = 1000
"""seed of every trial; the seeds of the race are others"""
MARGIN = 1.2
"""length of a stored run, in steps of the best trial: other seeds may take longer"""
SPACES = tomli.loads((Path(__file__).parent / "spaces.toml").read_text())
TRIED = Path(__file__).parents[1] / "results/speedrun_tuning.jsonl"

Trial = dict[str, Any]
Places = dict[str, int]
"""for each key, the index of its value in the space"""


def tried(row: str) -> list[Trial]:
    """Return the finished trials of a row, in order."""
    lines = TRIED.read_text().splitlines() if TRIED.exists() else []
    return [trial for trial in map(json.loads, lines) if trial["row"] == row]


def best_of(trials: list[Trial]) -> Trial:
    """Return the trial that took the fewest steps to the target, or else came nearest to it."""
    return min(trials, key=lambda each: (each["steps"] or math.inf, each["loss"]))


def propose(row: str, trials: list[Trial]) -> tuple[Places, int]:
    """Return the values and the length of the next trial, which depend on the earlier ones alone.

    The first trial takes the middle of each list, the next ones random values, and the last ones
    change some values of the best trial by one place. A trial is as long as the steps that the best
    one took: one that needs more is no better.
    """
    space = SPACES[row]
    draw = random.Random(f"{row} {len(trials)}")
    if not trials:
        return {key: len(values) // 2 for key, values in space.items()}, FIRST_LENGTH
    best = best_of(trials)
    # Rows that do not reach the target in the first trials get more steps.
    length = best["steps"] or FIRST_LENGTH + 20 * max(0, len(trials) - WIDE_TRIALS + 1)
    known = [trial["places"] for trial in trials]
    while True:
        if len(trials) < WIDE_TRIALS:
            places = {key: draw.randrange(len(values)) for key, values in space.items()}
        else:
            places = {
                key: place + draw.choice((-1, 0, 0, 1)) for key, place in best["places"].items()
            }
        is_inside = all(0 <= place < len(space[key]) for key, place in places.items())
        if is_inside and places not in known:
            return places, length


def tune(row: str) -> None:
    """Run the trials of a row that are not in the file yet, and append each to it."""
    while len(trials := tried(row)) < TRIALS:
        places, length = propose(row, trials)
        values = {key: SPACES[row][key][place] for key, place in places.items()}
        outcome = run_row(row, {**values, "run.steps": length}, SEED)
        trial = {"row": row, "places": places, "values": values, **outcome.as_json()}
        with TRIED.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        print(f"{row} {len(trials) + 1}/{TRIALS}: {outcome} {values}", flush=True)


def stored_length(best: Trial) -> int:
    """Return the steps of the runs with the values of a trial."""
    return round(MARGIN * (best["steps"] or best["length"]))


def store(row: str) -> None:
    """Write the values of a row's best trial, and a length for it, into the row's recipe."""
    file = RECIPES / f"{row}.toml"
    recipe, best = tomli.loads(file.read_text()), best_of(tried(row)[:TRIALS])
    found = {"run.steps": stored_length(best), **best["values"]}
    for key, value in found.items():
        *path, leaf = key.split(".")
        table = recipe
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = value
    file.write_text("#:schema ../schema.json\n" + "\n".join(_lines(recipe)) + "\n")


def _lines(table: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the lines of a table in TOML, those of tables within it last."""
    if path:
        yield f"\n[{path}]"
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{key} = {json.dumps(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{path}.{key}".lstrip("."))
