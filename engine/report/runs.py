"""Reads a run directory for the report: metrics, recipe without secrets, profile. Torch-free."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import Manifest, read_manifest
from ..checkpoint.retention import list_checkpoints
from ..core.errors import CheckpointError
from ..core.files import open_regular, read_regular
from ..core.run_dir import read_recipe
from ..core.text.display import join_key, redact
from ..core.text.tree import leaves
from ..observe.metrics import TASKS, VALIDATION, decode_rows
from .status import RunStatus, examine, number

Row = dict[str, float]
BITS = "bits_per_byte"
MAX_KEYS = 600
"""largest number of distinct keys that are read from metrics.jsonl"""
AXES = ("step", "time")


@dataclass(frozen=True)
class RunData:
    """The content of a run directory."""

    name: str
    path: Path
    status: RunStatus
    rows: dict[str, list[Row]]
    """rows by kind, one for each step, with `step`, `tokens` and `seconds` of training so far"""
    recipe: dict[str, Any]
    """the recipe's values by dotted key"""
    manifest: Manifest | None
    """manifest of the newest checkpoint that can be read"""
    checkpoints: list[int]
    """the steps of the checkpoints"""

    def column(self, kind: str, key: str) -> list[float]:
        """Return a key's values, in the order of the steps."""
        return [row[key] for row in self.rows.get(kind, []) if key in row]

    def last(self, kind: str, key: str) -> float | None:
        """Return a key's newest value."""
        column = self.column(kind, key)
        return column[-1] if column else None

    def finite(self, kind: str, key: str) -> list[float]:
        """Return a key's finite values, the lowest first."""
        return sorted(value for value in self.column(kind, key) if math.isfinite(value))

    def median(self, kind: str, key: str) -> float | None:
        """Return the median of a key's finite values, the upper one of an even number."""
        column = self.finite(kind, key)
        return column[len(column) // 2] if column else None

    def lowest(self, kind: str, key: str) -> float | None:
        """Return a key's lowest finite value."""
        return next(iter(self.finite(kind, key)), None)

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds spent in steps, the part spent waiting for data, and the remainder."""
        busy = waiting = 0.0
        before = 0.0
        train = self.rows.get("train", [])
        for row in train:
            steps, before = row["step"] - before, row["step"]
            busy += _finite(row.get("step_seconds")) * steps
            waiting += _finite(row.get("data_seconds")) * steps
        times = [row["time"] for kind in self.rows.values() for row in kind if "time" in row]
        first = _finite(train[0].get("step_seconds")) * train[0]["step"] if train else 0.0
        whole = max(times) - min(times) + first if times else 0.0
        return busy, min(waiting, busy), max(0.0, whole - busy)


def read_run(path: Path, name: str) -> RunData:
    """Read the directory of a run in any state; missing and damaged files are left out."""
    folders = list_checkpoints(path / "checkpoints")
    return RunData(
        name=name,
        path=path,
        status=examine(path),
        rows=_read_rows(path / "metrics.jsonl"),
        recipe=_flat(redact(read_recipe(path))),
        manifest=_newest_manifest(folders),
        checkpoints=[int(folder.name.removeprefix("step-")) for folder in folders],
    )


def have_different_tokenizers(runs: Sequence[RunData]) -> bool:
    """Return whether runs use different tokenizers, so that losses a token cannot be compared.

    The tokenizers' fingerprints in the checkpoints are compared. If a run has no checkpoint, the
    `[tokenizer]` tables of the recipes are compared instead.
    """
    known = [run.manifest.tokenizer if run.manifest else "" for run in runs]
    if not all(known):
        known = [
            repr({key: run.recipe[key] for key in run.recipe if key.startswith("tokenizer.")})
            for run in runs
        ]
    return len(set(known)) > 1


def lacks_bits_per_byte(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs whose evaluations have no bits per byte, such as those of older versions."""
    return [run for run in runs if not run.column("eval", BITS)]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a distinct name for each run: the folder's name, or the path if names collide."""
    names = [path.resolve().name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values differ between the runs' recipes, with the value of each run."""
    known = [run.recipe for run in runs if run.recipe]
    keys = dict.fromkeys(key for recipe in known for key in recipe)
    return [
        (key, [run.recipe.get(key) for run in runs])
        for key in keys
        if key not in ("run.name", "run.dir", "run.experiment", "run.lineage")
        and any(recipe.get(key) != known[0].get(key) for recipe in known)
    ]


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {join_key(path): value for path, value in leaves(recipe) if path}


def _newest_manifest(folders: Sequence[Path]) -> Manifest | None:
    for folder in folders[::-1]:
        try:
            return read_manifest(folder)
        except CheckpointError:
            continue
    return None


def _read_rows(path: Path) -> dict[str, list[Row]]:
    """Return the numbers of each row by kind, in the order of steps.

    A step occurs twice if a run resumed from before it; the later row wins.
    """
    by_kind: dict[str, dict[float, Row]] = {}
    keys = {"step", "tokens", "time", "step_seconds"}
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return {}
    for row in decode_rows(text):
        numbers = _numbers(row)
        if not keys.issuperset(numbers):
            # Those of the run come before those of each layer, which may be many.
            ordered = sorted(numbers, key=lambda key: "/" in key)
            keys.update(ordered[: MAX_KEYS - len(keys)])
            numbers = {key: value for key, value in numbers.items() if key in keys}
        if numbers.get("total_loss") == numbers.get("loss"):
            numbers.pop("total_loss", None)  # a plot that says nothing: there is no regulariser
        # Rows of training have the split of their step, and are one curve.
        kind = row.get("kind")
        split = row.get("split", VALIDATION) if kind == "eval" else VALIDATION
        if isinstance(kind, str) and len(by_kind) < MAX_KEYS:
            rows = by_kind.setdefault(kind, {})
            if split == VALIDATION:
                rows[numbers["step"]] = numbers
            else:  # beside the numbers of the validation split, which comes first
                prefix = "" if split == TASKS else f"{split}."
                others = {f"{prefix}{key}": numbers[key] for key in numbers if key not in AXES}
                rows.setdefault(numbers["step"], {"step": numbers["step"]}).update(others)
    sorted_rows = {kind: [by[step] for step in sorted(by)] for kind, by in by_kind.items()}
    _add_axes(sorted_rows)
    return sorted_rows


def _numbers(row: Mapping[str, Any]) -> Row:
    numbers: Row = {}
    for key, value in row.items():
        if type(value) is float:  # most are, and there may be millions
            numbers[key] = value
        elif (converted := number(value)) is not None:
            numbers[key] = converted
    return numbers


def _add_axes(rows: Mapping[str, list[Row]]) -> None:
    """Add `seconds` of training and `tokens` to each row in place, interpolated for other kinds."""
    train = rows.get("train", [])
    seconds = before = 0.0
    for row in train:
        seconds += _finite(row.get("step_seconds")) * (row["step"] - before)
        before = row["step"]
        row["seconds"] = _finite(seconds)
        row["tokens"] = _finite(row.get("tokens"))
    steps = [row["step"] for row in train]
    for kind, others in rows.items():
        for row in others if kind != "train" else []:
            for key in ("seconds", "tokens"):
                value = _between(train, bisect_right(steps, row["step"]), row["step"], key)
                row[key] = _finite(value)


def _between(train: Sequence[Row], index: int, step: float, key: str) -> float:
    """Interpolate a key linearly at a step between `train[index - 1]` and `train[index]`."""
    low = train[index - 1] if index else {"step": 0.0, key: 0.0}
    if index == len(train):
        return low[key]
    high = train[index]
    return low[key] + (high[key] - low[key]) * (step - low["step"]) / (high["step"] - low["step"])


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


MAX_PHASES = 12


@dataclass(frozen=True)
class ProfileSummary:
    """The mean seconds of the profiled steps, in all, by phase and by operator."""

    step_seconds: float
    phases: dict[str, float]
    operators: dict[str, float]


def read_profile(run: Path) -> ProfileSummary | None:
    """Return the profile of a run, or None if there is none that can be read."""
    try:
        content = json.loads(read_regular(run / "profiles" / "summary.json"))
        whole = number(content["step_seconds"])
        operators = {str(each["name"]): each["seconds"] for each in content["operators"]}
        if whole is None or not 0 < whole < math.inf:
            return None
        return ProfileSummary(
            whole, _finite_times(content["phase_seconds"]), _finite_times(operators)
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _finite_times(values: dict[str, Any]) -> dict[str, float]:
    numbers = ((name, number(value)) for name, value in values.items())
    finite = {name: value for name, value in numbers if value is not None and abs(value) < math.inf}
    return dict(list(finite.items())[:MAX_PHASES])
