"""The logs of a run, with one JSON object a line.

metrics.jsonl has each step once, however often the run was resumed. events.jsonl has the steps
that are worth a look.

JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity" and "-Infinity"
(the mapping of protocol buffers), and `read` turns them back into floats. Torch-free.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.files import atomic_write, open_regular, sync_folder

LARGEST_STEP = 2**53
EVENTS_FILE = "events.jsonl"
MAX_EVENTS_BYTES = 2**26
"""bytes of events.jsonl that are read"""
VALIDATION = "validation"
"""the `split` of evaluations of the validation split; rows of older versions have none"""
TASKS = "tasks"
"""the `split` of the scores of tasks of lm-evaluation-harness, whose rows have no loss"""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsLog:
    """Appends rows with full float precision, one write call a row.

    Args:
        path: the file, which is created if it is missing.
        resume_step: the step after which the run resumes; rows of later steps are dropped, and a
            last line that a kill left incomplete.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self._file = -1
        self.rewind(resume_step)

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        """Drop the rows of steps after `step`, for a resumed run and for a rollback.

        Args:
            step: the last step whose rows stay.
            is_evaluated: False drops the evaluation after `step` too, which will be done again.
        """
        # Closed first: the new file replaces the old one, and the descriptor is of the old one.
        self.close()
        is_new = not self.path.exists()
        if not is_new:
            with open_regular(self.path) as file:
                text = file.read().decode("utf-8", errors="replace")
            dropped = ("eval", step) if not is_evaluated else None
            kept_rows = "".join(
                line
                for line, row in _parse_rows(text)
                if row["step"] <= step and (row.get("kind"), row["step"]) != dropped
            )
            if kept_rows != text:
                atomic_write(self.path, kept_rows)
        self._torn = False
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if is_new:
            sync_folder(self.path.parent)  # `sync` makes the rows durable, but not the file's name

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row with `kind` and `step`.

        Raises:
            OSError: the disk is full. Rows that are written later are complete again.
        """
        line = json.dumps(replace_non_finite(dict(row)), allow_nan=False)
        data = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        # Until the write has returned: after an error the next row begins on a line of its own.
        self._torn = True
        self._torn = os.write(self._file, data) != len(data)

    def sync(self) -> None:
        """Make the rows survive a power cut, before a checkpoint is saved."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run; an incomplete line is skipped."""
    with open_regular(path) as file:
        return list(decode_rows(file.read().decode("utf-8", errors="replace")))


def decode_rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file's text, with "NaN" and "Infinity" as floats."""
    for _, row in _parse_rows(text):
        for key, value in row.items():
            if isinstance(value, str):
                row[key] = _WORDS.get(value, value)
        yield row


def _parse_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each complete line, with its newline, and the row in it."""
    # What follows the last newline is a row that a kill has cut short.
    for line in text.split("\n")[:-1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = row.get("step") if isinstance(row, dict) else None
        # `isinstance` would take true and false for steps.
        if type(step) is int and 0 <= step < LARGEST_STEP:
            yield line + "\n", row


def replace_non_finite(value: Any) -> Any:
    """Return a value that JSON can hold: a number that is not finite becomes a string."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run directory, oldest first; a line that is not an event is skipped."""
    with suppress(OSError), open_regular(folder / EVENTS_FILE) as file:
        for row in decode_rows(file.read(MAX_EVENTS_BYTES).decode("utf-8", errors="replace")):
            if isinstance(row.get("id"), str) and isinstance(row.get("kind"), str):
                yield row


def read_evaluations(folder: Path) -> dict[int, dict[str, float]]:
    """Return the numbers of a run's evaluations by step, named as `prefix_of` says."""
    path, found = folder / "metrics.jsonl", dict[int, dict[str, float]]()
    for row in read(path) if path.exists() else []:
        if row.get("kind") == "eval":
            prefix = prefix_of(row.get("split", VALIDATION))
            numbers = {f"{prefix}{key}": each for key, each in row.items() if type(each) is float}
            found.setdefault(row["step"], {}).update(numbers)
    return found


def prefix_of(split: str) -> str:
    """Return what comes before the keys of a split's numbers in `evaluate.metric`."""
    return "" if split in (VALIDATION, TASKS) else f"{split}."
