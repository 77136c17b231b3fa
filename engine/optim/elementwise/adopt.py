"""ADOPT (Taniguchi et al. 2024, arXiv:2411.02853, algorithm 2) and its quasi-hyperbolic form."""

from __future__ import annotations

from typing import Any

from ....kernels.torch_private import (
    foreach_addcmul_,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)
from .base import ElementwiseOptimizer, Tensors


class ADOPTOptimizer(ElementwiseOptimizer):
    """Divides the gradient by the root of the mean square of the gradients before it.

    Step 0 only sets the mean square. Quasi-hyperbolic: `nu` weighs the mean of these normalised
    gradients against the newest one.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def update(
        self,
        group: dict[str, Any],
        step: int,
        weights: Tensors,
        gradients: Tensors,
        *moments: Tensors,
    ) -> None:
        """Change weights and moments; see `ElementwiseOptimizer.update`."""
        means, squares = moments
        beta1, beta2 = group["betas"]
        if step == 0:
            foreach_addcmul_(squares, gradients, gradients)
            return
        roots = foreach_sqrt(squares)
        foreach_clamp_min_(roots, group["eps"])
        normalised = foreach_div(gradients, roots)
        bound = step**0.25
        foreach_clamp_min_(normalised, -bound)
        foreach_clamp_max_(normalised, bound)
        foreach_lerp_(means, normalised, 1 - beta1)
        nu = group.get("nu", 1.0)
        self.subtract(group, weights, means if nu == 1 else foreach_lerp(normalised, means, nu))
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
