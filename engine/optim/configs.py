"""Optimizers and schedules: their recipe tables. Torch is imported when one is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..core.config import Betas, Component, Count, CountOrZero, Fraction, Table
from ..core.registry import Registry

if TYPE_CHECKING:
    import torch

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class ParameterGroup(Table):
    """Parameters whose names match get their own values; the first matching group wins."""

    match: str
    """glob over parameter names, or `re:` and a regular expression"""
    lr: NonNegativeFloat | None = None
    """peak learning rate of these parameters"""
    weight_decay: NonNegativeFloat | None = None
    """weight decay of these parameters"""
    betas: Betas | None = None
    """betas of these parameters"""
    eps: PositiveFloat | None = None
    """epsilon of these parameters"""
    momentum: NonNegativeFloat | None = None
    """momentum of these parameters"""

    def overrides(self) -> dict[str, Any]:
        """Return only the values that this group sets."""
        return self.model_dump(exclude={"match"}, exclude_none=True)


class OptimizerConfig(Component):
    """Base of every optimizer's table."""

    group_keys: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    """which keys of a `[[optimizer.groups]]` entry this optimizer understands"""

    lr: NonNegativeFloat = 3e-4
    """peak learning rate; the schedule multiplies it"""
    weight_decay: NonNegativeFloat = 0.1
    """decoupled weight decay"""
    clip_norm: NonNegativeFloat = 1.0
    """largest global gradient norm; 0 does not clip"""
    groups: list[ParameterGroup] = []
    """other values for parameters chosen by name"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over torch parameter groups (each with its `lr` and overrides)."""
        raise NotImplementedError


optimizers: Registry[OptimizerConfig] = Registry("optimizer", default="adamw")


@optimizers.register
class AdamW(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})

    name: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)
    """decay of the running means of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return torch's fused AdamW."""
        import torch

        return torch.optim.AdamW(
            groups, self.lr, self.betas, self.eps, self.weight_decay, fused=True
        )


@optimizers.register
class Adam(OptimizerConfig):
    """Adam with L2 regularisation inside the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""

    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})

    name: Literal["adam"] = "adam"
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty, added to the gradient"""
    betas: Betas = (0.9, 0.95)
    """decay of the running means of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return torch's fused Adam."""
        import torch

        return torch.optim.Adam(
            groups, self.lr, self.betas, self.eps, self.weight_decay, fused=True
        )


@optimizers.register
class SGD(OptimizerConfig):
    """Stochastic gradient descent, with momentum if asked for."""

    group_keys = frozenset({"lr", "weight_decay", "momentum"})

    name: Literal["sgd"] = "sgd"
    lr: NonNegativeFloat = 0.1
    """peak learning rate; the schedule multiplies it"""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty, added to the gradient"""
    momentum: NonNegativeFloat = 0.0
    """decay of the running mean of the gradient"""
    nesterov: bool = False
    """look ahead along the momentum"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return torch's SGD over lists of tensors; its fused one cannot update shards."""
        import torch

        return torch.optim.SGD(
            groups,
            self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            foreach=True,
        )


class ScheduleConfig(Component):
    """Base of every learning-rate schedule: a pure function of the step."""

    warmup_steps: CountOrZero = 0
    """steps over which the rate rises linearly from nearly 0 to its peak"""

    def factor(self, step: int, total: int) -> float:
        """Return what the peak rate is multiplied by at `step` (0-based) of `total`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self.after_warmup(step - self.warmup_steps, max(1, total - self.warmup_steps))

    def after_warmup(self, step: int, total: int) -> float:
        """Return the factor at `step` of `total`, both counted from the end of the warmup."""
        raise NotImplementedError

    depends_on_total: ClassVar[bool] = True
    """whether a longer run changes the factors of the steps before"""


schedules: Registry[ScheduleConfig] = Registry("schedule", default="wsd")


def _decay(shape: str, progress: float) -> float:
    """Return a curve from 1 at progress 0 to 0 at progress 1."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress


@schedules.register
class WSD(ScheduleConfig):
    """Warmup, stable, decay (Hu et al. 2024, arXiv:2404.06395; shapes: arXiv:2405.18392)."""

    name: Literal["wsd"] = "wsd"
    decay_fraction: Fraction = 0.2
    """share of all steps over which the rate falls at the end"""
    decay: Literal["linear", "cosine", "sqrt"] = "linear"
    """shape of the fall; "sqrt" is 1 - sqrt(progress)"""
    min_lr_ratio: Fraction = 0.0
    """the rate at the end, as a share of the peak"""

    def factor(self, step: int, total: int) -> float:
        """Return the factor; the decay is a share of all steps, warmup included."""
        decay_steps = round(total * self.decay_fraction)
        start = max(total - decay_steps, self.warmup_steps)
        if step < start or total <= start:
            return super().factor(step, total)
        fall = _decay(self.decay, min(1.0, (step - start) / (total - start)))
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
        fall = max(0.0, 1 - step / total) ** self.power
        return float(self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)
