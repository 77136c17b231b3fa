"""The best evaluation so far, and how long ago that was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tables import Evaluate


@dataclass
class Best:
    """Every rank holds the same: what is evaluated is the same number on all of them."""

    metric: str = ""
    """what the score is of; another metric or direction starts anew"""
    direction: str = ""
    score: float | None = None
    step: int = 0
    """when it was reached"""
    bad: int = 0
    """evaluations since then"""

    def take(self, table: Evaluate, step: int, values: Mapping[str, float]) -> bool:
        """Take note of an evaluation; return whether it is the best so far.

        A value that is not finite never is. A smaller change than `min_delta` is no improvement.
        """
        if (self.metric, self.direction) != (table.metric, table.direction):
            self.metric, self.direction = table.metric, table.direction
            self.score, self.step, self.bad = None, 0, 0
        value = values[table.metric]
        gain = math.inf
        if self.score is not None:
            gain = self.score - value if table.direction == "min" else value - self.score
        if math.isfinite(value) and gain > 0 and gain >= table.min_delta:
            self.score, self.step, self.bad = value, step, 0
            return True
        self.bad += 1
        return False

    def is_exhausted(self, table: Evaluate) -> bool:
        """Return whether the run should end early."""
        return 0 < table.patience <= self.bad and (self.metric, self.direction) == (
            table.metric,
            table.direction,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest keeps."""
        return asdict(self)

    @staticmethod
    def restored(extra: Mapping[str, Any]) -> Best:
        """Return what a manifest's `extra` says; nothing yet in those of former versions."""
        return Best(**extra.get("best", {}))

    def told(self) -> str:
        """Return in words why a run ends early."""
        found = "none was finite"
        if self.score is not None:
            found = f"the best is {self.score:.6g} at step {self.step}"
        return f"{self.metric} not better in {self.bad} evaluations ({found})"
