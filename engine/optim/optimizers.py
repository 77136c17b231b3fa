"""Optimizers. Torch is imported when one is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..core.config import Betas
from .tables import (
    NonNegativeFloat,
    OptimizerConfig,
    PositiveFloat,
    StateDtype,
    optimizers,
    warn_of_slow_means,
)

if TYPE_CHECKING:
    import torch


@optimizers.register
class AdamW(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})

    name: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)
    """decay of the running means of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""
    cautious_decay: bool = False
    """decay only the elements that the update moves towards 0 (arXiv:2510.12402)"""
    state_dtype: StateDtype = "fp32"
    """dtype of the running means: "fp32" (that of the weights), "bf16", or "int8" with a scale for
    each block of up to 256 elements of a row (arXiv:2110.02861)"""

    def warnings(self) -> Iterator[str]:
        """Yield what is likely to be a mistake."""
        yield from warn_of_slow_means(self.state_dtype, self.betas)

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return torch's fused AdamW, or one over lists of tensors for cautious decay."""
        import torch

        if self.cautious_decay or self.state_dtype != "fp32":
            from .elementwise.qhadam import QHAdamOptimizer

            keys = {"lr", "weight_decay", "betas", "eps", "cautious_decay", "state_dtype"}
            return QHAdamOptimizer(groups, nus=(1.0, 1.0), **self.model_dump(include=keys))
        # Fused: one kernel for many tensors. It runs on CPUs and on shards of DTensors too.
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
        """Return torch's SGD over lists of tensors: its fused one cannot update shards."""
        import torch

        return torch.optim.SGD(
            groups,
            self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            foreach=True,
        )
