"""AdamW without a schedule (Defazio et al. 2024, arXiv:2405.15682, algorithm 1)."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ....kernels.torch_private import (
    foreach_add,
    foreach_add_,
    foreach_div,
    foreach_lerp_,
    foreach_sqrt,
)
from ...core.local import local
from .base import ElementwiseOptimizer, Group, Tensors, add_to_mean_squares


class ScheduleFreeOptimizer(ElementwiseOptimizer):
    """Steps `z`, and trains the weights y = (1 - beta1) z + beta1 x, where x is the mean of all z.

    The weight of a step in the mean is the square of the step's rate. `average` returns x, which is
    evaluated and exported.
    """

    moments = ("exp_avg_sq", "z")

    def update(
        self, group: Group, step: int, weights: Tensors, gradients: Tensors, moments: list[Tensors]
    ) -> None:
        """Change weights and moments in place; see `ElementwiseOptimizer.update`."""
        if step == 0:
            foreach_add_(moments[1], weights)  # which is 0 so far
        # Parameters of one age may have skipped different steps, and so have different means.
        by_sum = defaultdict[float, list[int]](list)
        for index, weight in enumerate(weights):
            by_sum[self.state[weight].get("weight_sum", 0.0)].append(index)
        for total, indices in by_sum.items():
            total += group["lr"] ** 2
            parts = [[tensors[i] for i in indices] for tensors in (weights, gradients, *moments)]
            self._move(group, step, group["lr"] ** 2 / total if total else 0.0, *parts)
            for index in indices:
                self.state[weights[index]]["weight_sum"] = total

    def _move(
        self,
        group: Group,
        step: int,
        share: float,
        weights: Tensors,
        gradients: Tensors,
        squares: Tensors,
        points: Tensors,
    ) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        add_to_mean_squares(squares, gradients, beta2)
        denominators = foreach_sqrt(foreach_div(squares, 1 - beta2 ** (step + 1)))
        foreach_add_(denominators, group["eps"])
        updates = foreach_div(gradients, denominators)
        updates = foreach_add(updates, weights, alpha=group["weight_decay"])
        foreach_lerp_(weights, points, share)
        foreach_add_(weights, updates, alpha=lr * (beta1 * (1 - share) - 1))
        foreach_add_(points, updates, alpha=-lr)

    @torch.no_grad()
    def average(self, weight: Tensor) -> Tensor | None:
        """Return this rank's part of x for a parameter; None before the first step."""
        if "z" not in self.state.get(weight, {}):
            return None
        group = next(g for g in self.param_groups if any(weight is each for each in g["params"]))
        point = local(self.state[weight]["z"])
        return torch.lerp(local(weight).to(point.dtype), point, 1 - 1 / group["betas"][0])
