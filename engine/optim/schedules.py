"""Schedules of the learning rate: functions of the step. Torch-free."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from ..core.config import Count, Fraction
from .tables import PositiveFloat, ScheduleConfig, schedules


def _decay(shape: str, progress: float, power: float = 1.0) -> float:
    """Return a curve from 1 at progress 0 to 0 at progress 1."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return 1 - math.sqrt(progress)
    if shape == "power":
        return float((1 - progress) ** power)
    return 1 - progress


@schedules.register
class WSD(ScheduleConfig):
    """Warmup, stable, decay (Hu et al. 2024, arXiv:2404.06395; shapes: arXiv:2405.18392)."""

    name: Literal["wsd"] = "wsd"
    decay_fraction: Fraction = 0.2
    """share of all steps over which the rate falls at the end"""
    decay: Literal["linear", "cosine", "sqrt", "power"] = "linear"
    """shape of the fall; "sqrt" is 1 - sqrt(progress), "power" (1 - progress) ** decay_power"""
    decay_power: PositiveFloat = 2.0
    """exponent when `decay` is "power"; the other shapes ignore it"""
    min_lr_ratio: Fraction = 0.0
    """the rate at the end, as a share of the peak"""

    def lr_factor(self, step: int, total: int) -> float:
        """Return the factor; the decay is a share of all steps, warmup included."""
        decay_steps = round(total * self.decay_fraction)
        # In a short run warmup and decay may overlap: then the warmup is completed first.
        start = max(total - decay_steps, self.warmup_steps)
        if step < start or total <= start:
            return super().lr_factor(step, total)
        progress = min(1.0, (step - start) / (total - start))
        fall = _decay(self.decay, progress, self.decay_power)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * fall

    def after_warmup(self, step: int, total: int) -> float:
        """Return 1: the stable phase."""
        return 1.0


@schedules.register
class Cosine(ScheduleConfig):
    """Half a cosine from the peak to `min_lr_ratio` (SGDR, arXiv:1608.03983, one cycle)."""

    name: Literal["cosine"] = "cosine"
    min_lr_ratio: Fraction = 0.0
    """the rate at the end, as a share of the peak"""

    def after_warmup(self, step: int, total: int) -> float:
        """Return the cosine's value."""
        fall = _decay("cosine", min(1.0, step / total))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * fall


@schedules.register
class LinearSchedule(ScheduleConfig):
    """A straight line from the peak to `min_lr_ratio`."""

    name: Literal["linear"] = "linear"
    min_lr_ratio: Fraction = 0.0
    """the rate at the end, as a share of the peak"""

    def after_warmup(self, step: int, total: int) -> float:
        """Return the line's value."""
        fall = _decay("linear", min(1.0, step / total))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * fall


@schedules.register
class ConstantSchedule(ScheduleConfig):
    """The peak rate all the way after the warmup."""

    depends_on_total = False

    name: Literal["constant"] = "constant"

    def after_warmup(self, step: int, total: int) -> float:
        """Return 1."""
        return 1.0


@schedules.register
class InverseSqrt(ScheduleConfig):
    """The rate falls with the inverse square root of the step (arXiv:1706.03762, eq. 3)."""

    depends_on_total = False

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: Count = 10_000
    """steps after the warmup until the rate is 1/sqrt(2) of its peak"""

    def after_warmup(self, step: int, total: int) -> float:
        """Return sqrt(timescale / (timescale + step))."""
        return math.sqrt(self.timescale / (self.timescale + step))


@schedules.register
class Exponential(ScheduleConfig):
    """The rate falls by the same factor each step, to `min_lr_ratio` at the end."""

    name: Literal["exponential"] = "exponential"
    min_lr_ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    """the rate at the end, as a share of the peak"""

    def after_warmup(self, step: int, total: int) -> float:
        """Return min_lr_ratio ** progress."""
        return float(self.min_lr_ratio ** min(1.0, step / total))


@schedules.register
class Polynomial(ScheduleConfig):
    """The rate falls as a power of what is left of the run."""

    name: Literal["polynomial"] = "polynomial"
    power: PositiveFloat = 2.0
    """exponent; 1 is a straight line"""
    min_lr_ratio: Fraction = 0.0
    """the rate at the end, as a share of the peak"""

    def after_warmup(self, step: int, total: int) -> float:
        """Return (1 - progress) ** power between the peak and `min_lr_ratio`."""
        fall = _decay("power", min(1.0, step / total), self.power)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * fall


@schedules.register
class Scaled(ScheduleConfig):
    """Warmup and cooldown multiply a curve that falls from the first step on (DanLing).

    The warmup is `warmup_steps` long if that is given. Progress is counted from 1 / steps to 1.
    """

    name: Literal["scaled"] = "scaled"
    curve: Literal["linear", "cosine", "constant"] = "cosine"
    """how the curve advances from the peak to `final_lr_ratio`"""
    scaling: Literal["percentile", "numerical"] = "percentile"
    """"percentile": by equal factors; "numerical": by equal differences"""
    final_lr_ratio: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """the end of the curve, as a share of the peak"""
    warmup_fraction: Fraction = 0.05
    """share of all steps of the warmup"""
    cooldown_fraction: Fraction = 0.2
    """share of all steps at the end over which the rate falls to `min_lr_ratio`"""
    min_lr_ratio: Fraction = 1e-6
    """the lowest rate, as a share of the peak"""

    def lr_factor(self, step: int, total: int) -> float:
        """Return the factor: the curve, between which and the lowest rate the ends are."""
        number = min(step + 1, total)
        share = number / total
        ratio = {"linear": share, "cosine": 1 - _decay("cosine", share), "constant": 0.0}[
            self.curve
        ]
        if self.scaling == "percentile":
            factor = float(self.final_lr_ratio**ratio)
        else:
            factor = (1 - ratio) * (1 - self.final_lr_ratio) + self.final_lr_ratio
        # Fractions such as 0.05 are no exact numbers: the margin rounds like integer division.
        warmup = self.warmup_steps or int(total * self.warmup_fraction + 1e-9)
        cooldown = int(total * self.cooldown_fraction + 1e-9)
        strength = min(1.0, number / warmup) if warmup else 1.0
        if number > total - cooldown:
            strength *= (total - number) / cooldown
        return max(self.min_lr_ratio, strength * (factor - self.min_lr_ratio) + self.min_lr_ratio)
