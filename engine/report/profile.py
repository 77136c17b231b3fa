"""What `[profile]` left in `profiles/summary.json`. Torch-free."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.files import read_regular
from .status import number

MAX_PHASES = 12


@dataclass(frozen=True)
class ProfileSummary:
    """Mean seconds of the steps that were looked at."""

    step_seconds: float
    phases: dict[str, float]
    operators: dict[str, float]


def read_profile(run: Path) -> ProfileSummary | None:
    """Return a run's profile; None: it has none that can be read."""
    try:
        content = json.loads(read_regular(run / "profiles" / "summary.json"))
        whole = number(content["step_seconds"])
        operators = {str(each["name"]): each["seconds"] for each in content["operators"]}
        if whole is None or not 0 < whole < math.inf:
            return None
        return ProfileSummary(whole, _numbers(content["phase_seconds"]), _numbers(operators))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    found = ((name, number(value)) for name, value in values.items())
    finite = {name: value for name, value in found if value is not None and abs(value) < math.inf}
    return dict(list(finite.items())[:MAX_PHASES])
