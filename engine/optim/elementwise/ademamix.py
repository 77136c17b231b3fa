"""AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1)."""

from __future__ import annotations

import math
from typing import Any

from ....kernels.torch_private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)
from .base import ElementwiseOptimizer, Tensors


class AdEMAMixOptimizer(ElementwiseOptimizer):
    """AdamW with a second, far slower mean of the gradients in the numerator."""

    moments = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    def update(
        self,
        group: dict[str, Any],
        step: int,
        weights: Tensors,
        gradients: Tensors,
        *moments: Tensors,
    ) -> None:
        """Change weights and moments; see `ElementwiseOptimizer.update`."""
        fast, slow, squares = moments
        beta1, beta2 = group["betas"]
        number = step + 1
        alpha, slow_beta = interpolate(
            number, group["slow_warmup_steps"], group["alpha"], beta1, group["slow_beta"]
        )
        foreach_lerp_(fast, gradients, 1 - beta1)
        foreach_lerp_(slow, gradients, 1 - slow_beta)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates = foreach_div(fast, 1 - beta1**number)
        foreach_add_(updates, slow, alpha=alpha)
        denominators = foreach_sqrt(squares)
        foreach_div_(denominators, math.sqrt(1 - beta2**number))
        foreach_add_(denominators, group["eps"])
        foreach_div_(updates, denominators)
        self.subtract(group, weights, updates)


def interpolate(
    number: int, warmup_steps: int, alpha: float, start: float, end: float
) -> tuple[float, float]:
    """Return the weight of the slow mean and its decay at a step, counted from 1 (section 3.1).

    The weight rises linearly; of the decay the half-life does, nearly, from that of `start` on.
    """
    if number >= warmup_steps:
        return alpha, end
    share = number / warmup_steps
    log_start, log_end = math.log(start), math.log(end)
    decay = math.exp(log_start * log_end / ((1 - share) * log_end + share * log_start))
    return share * alpha, min(decay, end)
