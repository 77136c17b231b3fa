"""results.json: the latest and the best evaluation of a run. Torch-free."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.files import atomic_write, read_regular
from .metrics import replace_non_finite

FILE = "results.json"

log = logging.getLogger(__name__)


class Results:
    """Keeps results.json up to date; readers see it whole.

    Args:
        folder: the run directory.
        step: the step after which the run begins or resumes; later evaluations are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / FILE
        self._evaluations = {
            name: row for name, row in _read(self._path).items() if _step_of(row) <= step
        }

    def record(self, step: int, values: Mapping[str, Any], best: Mapping[str, Any]) -> None:
        """Write an evaluation as the latest one, and the best one if it is that.

        Args:
            step: number of finished steps.
            values: the numbers of the evaluation.
            best: `metric`, `direction`, `score` and `step` of the best evaluation so far; a score
                of None: there is none.
        """
        latest = {"step": step, **values}
        found = self._evaluations.get("best", {})
        if best["score"] is None:
            found = {}
        elif best["step"] == step:
            found = latest
        elif _step_of(found) != best["step"]:  # the file was lost
            found = {"step": best["step"], best["metric"]: best["score"]}
        chosen = {"metric": best["metric"], "direction": best["direction"]}
        self._evaluations = {"latest": latest, "best": {**chosen, **found}}
        content = {name: row for name, row in self._evaluations.items() if "step" in row}
        text = json.dumps(replace_non_finite(content), indent=1, allow_nan=False) + "\n"
        try:
            atomic_write(self._path, text)
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error.strerror)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    rows = content.items() if isinstance(content, dict) else ()
    return {name: row for name, row in rows if isinstance(row, dict)}


def _step_of(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else float("inf")
