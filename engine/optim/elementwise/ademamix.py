"""AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1)."""

from __future__ import annotations

import math

from ....kernels.torch_private import (
    foreach_add_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_sqrt,
)
from .base import ElementwiseOptimizer, Group, Tensors, add_to_mean_squares


class AdEMAMixOptimizer(ElementwiseOptimizer):
    """AdamW whose numerator adds a second, slower running mean of the gradients."""

    moments = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    def compute_updates(
        self, group: Group, step: int, gradients: Tensors, *moments: Tensors
    ) -> Tensors:
        """Return the updates; see `ElementwiseOptimizer.compute_updates`."""
        fast, slow, squares = moments
        beta1, beta2 = group["betas"]
        number = step + 1
        alpha, slow_beta = interpolate(
            number, group["slow_warmup_steps"], group["alpha"], beta1, group["slow_beta"]
        )
        foreach_lerp_(fast, gradients, 1 - beta1)
        foreach_lerp_(slow, gradients, 1 - slow_beta)
        add_to_mean_squares(squares, gradients, beta2)
        updates: Tensors = foreach_div(fast, 1 - beta1**number)
        foreach_add_(updates, slow, alpha=alpha)
        denominators = foreach_sqrt(squares)
        foreach_div_(denominators, math.sqrt(1 - beta2**number))
        foreach_add_(denominators, group["eps"])
        foreach_div_(updates, denominators)
        return updates


def interpolate(
    number: int, warmup_steps: int, alpha: float, start: float, end: float
) -> tuple[float, float]:
    """Return the weight and the decay of the slow mean at a step (arXiv:2409.03137, section 3).

    The weight rises linearly from 0 to `alpha`. The decay rises from `start` to `end` so that its
    half-life rises almost linearly.

    Args:
        number: the step, counted from 1.
        warmup_steps: the step from which on the weight is `alpha` and the decay is `end`.
        alpha: the last weight.
        start: the first decay, above 0.
        end: the last decay.
    """
    if number >= warmup_steps:
        return alpha, end
    share = number / warmup_steps
    log_start, log_end = math.log(start), math.log(end)
    decay = math.exp(log_start * log_end / ((1 - share) * log_end + share * log_start))
    return share * alpha, min(decay, end)
