"""The base of optimizers whose update of an element needs nothing of the other elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....kernels.torch_private import (
    foreach_add_,
    foreach_clamp_min_,
    foreach_mul,
    foreach_mul_,
    foreach_sign_,
)

Tensors = list[Tensor]


class ElementwiseOptimizer(Optimizer):
    """Updates lists of tensors at once; a subclass says how.

    Since elements are independent, each rank updates its own shard of a weight, in any plan, and
    no step waits for the device.

    Args:
        groups: parameter groups of torch.
        defaults: values for the groups that do not set them; `lr`, `weight_decay` and, where decay
            may be cautious, `cautious_decay`.
    """

    moments: ClassVar[Sequence[str]] = ()
    """keys of the tensors that are kept for each weight, in its shape"""

    def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, {"cautious_decay": False, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            weights_at = defaultdict[int, Tensors](list)
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "step" not in state:
                    state["step"] = 0
                    state.update({key: torch.zeros_like(weight) for key in self.moments})
                weights_at[state["step"]].append(weight)
                state["step"] += 1
            for step, weights in weights_at.items():
                gradients = [cast(Tensor, weight.grad) for weight in weights]
                moments = [[self.state[weight][key] for weight in weights] for key in self.moments]
                self.update(group, step, weights, gradients, *moments)

    def update(
        self,
        group: dict[str, Any],
        step: int,
        weights: Tensors,
        gradients: Tensors,
        *moments: Tensors,
    ) -> None:
        """Change weights and moments in place.

        Args:
            group: has the options, and `lr` of this step.
            step: how often these weights were updated before.
            weights: those with a gradient.
            gradients: of the weights; they are not changed.
            moments: a list for each key of `moments`.
        """
        raise NotImplementedError

    def subtract(self, group: dict[str, Any], weights: Tensors, updates: Tensors) -> None:
        """Decay weights by `lr * weight_decay`, and subtract `lr` times the updates.

        Cautious decay leaves alone the elements that the update moves away from 0, or does not
        move (Chen et al. 2025, arXiv:2510.12402).
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
        foreach_add_(weights, updates, alpha=-lr)
