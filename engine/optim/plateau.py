"""A schedule that lowers the learning rate when the score of evaluations stops improving."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from ..core.config import CountOrZero, Fraction
from .tables import NonNegativeFloat, ScheduleConfig, ScheduleState, schedules


@schedules.register
class Plateau(ScheduleConfig):
    """The rate is multiplied by `factor` each time `evaluate.metric` stops improving.

    Rules and defaults are those of torch.optim.lr_scheduler.ReduceLROnPlateau (torch 2.13), with
    two differences: a score that is not finite is never an improvement, and a relative threshold is
    a share of the score's size, so that it has the same meaning for scores below 0.
    """

    depends_on_total = False
    follows_score = True

    name: Literal["plateau"] = "plateau"
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """what each reduction multiplies the rate by"""
    patience: CountOrZero = 10
    """evaluations in a row without improvement that are tolerated; the next one lowers the rate"""
    threshold: NonNegativeFloat = 1e-4
    """a score must be better than the best one by more than this to be an improvement"""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """"rel": the threshold is a share of the best score; "abs": a difference"""
    cooldown: CountOrZero = 0
    """evaluations after a reduction in which the score need not improve"""
    min_lr_ratio: Fraction = 0.0
    """the lowest rate, as a share of the peak"""

    def after_warmup(self, step: int, total: int) -> float:
        """Return 1: what evaluations change is in the state of the schedule."""
        return 1.0

    def after_evaluation(
        self, state: ScheduleState, step: int, score: float, *, maximize: bool
    ) -> None:
        """Count evaluations without improvement, and lower the rate after too many in a row."""
        if step < self.warmup_steps:
            return  # the rate still rises: the score says nothing about its peak
        if self._improves(score, state.best, maximize=maximize):
            state.best, state.bad = score, 0
        else:
            state.bad += 1
        if state.cooldown:
            state.cooldown, state.bad = state.cooldown - 1, 0
        if state.bad > self.patience:
            state.ratio = max(state.ratio * self.factor, self.min_lr_ratio)
            state.cooldown, state.bad = self.cooldown, 0

    def _improves(self, score: float, best: float | None, *, maximize: bool) -> bool:
        if best is None or not math.isfinite(score):
            return math.isfinite(score)
        margin = self.threshold * (abs(best) if self.threshold_mode == "rel" else 1.0)
        return score > best + margin if maximize else score < best - margin
