"""QHAdam (Ma & Yarats 2019, arXiv:1810.06801, section 4), of which Adam is a special case."""

from __future__ import annotations

from typing import Any

from ....kernels.torch_private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_sqrt,
)
from .base import ElementwiseOptimizer, Tensors


class QHAdamOptimizer(ElementwiseOptimizer):
    """Adam whose numerator and denominator are interpolated with those of the newest gradient.

    `nus` weigh the running means; (1, 1) is AdamW.
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
        (beta1, beta2), (nu1, nu2) = group["betas"], group["nus"]
        foreach_lerp_(means, gradients, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates = foreach_div(means, 1 - beta1 ** (step + 1))
        denominators = foreach_div(squares, 1 - beta2 ** (step + 1))
        if nu1 != 1:
            updates = foreach_lerp(gradients, updates, nu1)
        if nu2 != 1:
            denominators = foreach_lerp(foreach_mul(gradients, gradients), denominators, nu2)
        denominators = foreach_sqrt(denominators)
        foreach_add_(denominators, group["eps"])
        foreach_div_(updates, denominators)
        self.subtract(group, weights, updates)
