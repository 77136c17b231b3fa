"""The base class of optimizers that update each element independently of the other elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....kernels.torch_private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_clamp_min_,
    foreach_mul,
    foreach_mul_,
    foreach_sign_,
)
from .narrow import new_moment, read_moment, write_moment

Group = dict[str, Any]
"""a parameter group of torch: options, and `lr` of this step"""
Tensors = list[Tensor]


class ElementwiseOptimizer(Optimizer):
    """Updates lists of tensors at once; a subclass computes the updates.

    Elements are independent, so that each rank can step its own shards under any parallelism plan.
    A step never waits for the device.

    Args:
        groups: parameter groups of torch.
        defaults: options for the groups that do not set them; `lr`, `weight_decay`,
            `cautious_decay` and those of the subclass.
    """

    moments: ClassVar[Sequence[str]] = ()
    """names of the state tensors of each parameter, which have the parameter's shape"""
    takes_shards: ClassVar[bool] = True
    """whether a step may see this rank's shards in place of DTensors"""

    def __init__(self, groups: Sequence[Group], **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            dtype = group.get("state_dtype", "fp32")
            # Parameters may differ in how often they had a gradient.
            weights_at = defaultdict[int, Tensors](list)
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "step" not in state:
                    state["step"] = 0
                    for key in self.moments:
                        state |= new_moment(weight, key, dtype)
                weights_at[state["step"]].append(weight)
                state["step"] += 1
            for step, weights in weights_at.items():
                if dtype == "fp32":
                    self._update(group, step, weights)
                    continue
                for weight in weights:  # moments of one weight at a time in their full width
                    self._update_narrow(group, step, weight)

    def _update(self, group: Group, step: int, weights: Tensors) -> None:
        gradients = [cast(Tensor, weight.grad) for weight in weights]
        moments = [[self.state[weight][key] for weight in weights] for key in self.moments]
        self.update(group, step, weights, gradients, moments)

    def _update_narrow(self, group: Group, step: int, weight: Tensor) -> None:
        state, gradient = self.state[weight], cast(Tensor, weight.grad)
        moments = [[read_moment(state, key, weight.dtype)] for key in self.moments]
        self.update(group, step, [weight], [gradient], moments)
        for key, (moment,) in zip(self.moments, moments, strict=True):
            write_moment(state, key, moment)

    def update(
        self, group: Group, step: int, weights: Tensors, gradients: Tensors, moments: list[Tensors]
    ) -> None:
        """Change weights and moments in place; the arguments are those of `compute_updates`."""
        updates = self.compute_updates(group, step, gradients, *moments)
        if updates is not None:
            apply_updates(group, weights, updates)

    def compute_updates(
        self, group: Group, step: int, gradients: Tensors, *moments: Tensors
    ) -> Tensors | None:
        """Change the moments in place, and return what `lr` multiplies; None: no weight changes.

        Args:
            group: the options.
            step: number of earlier updates of these parameters.
            gradients: a tensor for each parameter, which this method must not change.
            moments: for each name in `moments`, a list with a tensor for each parameter.
        """
        raise NotImplementedError


def apply_updates(group: Group, weights: Tensors, updates: Tensors, scale: float = 1.0) -> None:
    """Decay weights by `lr * weight_decay`, and subtract `lr * scale` times the updates.

    With `cautious_decay`, an element decays only if its update moves it towards 0 (Chen et al.
    2025, arXiv:2510.12402).
    """
    lr = group["lr"]
    decay = lr * group["weight_decay"]
    if decay and group["cautious_decay"]:
        decays = foreach_mul(updates, weights)
        foreach_sign_(decays)
        foreach_clamp_min_(decays, 0.0)
        foreach_mul_(decays, weights)
        foreach_add_(weights, decays, alpha=-decay)
    elif decay:
        foreach_mul_(weights, 1 - decay)
    foreach_add_(weights, updates, alpha=-lr * scale)


def add_to_mean_squares(squares: Tensors, gradients: Tensors, beta: float) -> None:
    """Update running means of squared gradients, which decay by `beta`, in place."""
    foreach_mul_(squares, beta)
    foreach_addcmul_(squares, gradients, gradients, 1 - beta)
