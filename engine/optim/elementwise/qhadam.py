"""QHAdam (Ma & Yarats 2019, arXiv:1810.06801), of which Adam is a special case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ....kernels.torch_private import (
    foreach_add_,
    foreach_div,
    foreach_div_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul,
    foreach_sqrt,
)
from .base import ElementwiseOptimizer, Group, Tensors, add_to_mean_squares


class QHAdamOptimizer(ElementwiseOptimizer):
    """AdamW that averages the running means with the newest gradient and its square.

    `nus` are the weights of the running means of the gradient and of its square; (1, 1) is AdamW.
    """

    moments: ClassVar[Sequence[str]] = ("exp_avg", "exp_avg_sq")

    def compute_updates(
        self, group: Group, step: int, gradients: Tensors, *moments: Tensors
    ) -> Tensors:
        """Return the updates; see `ElementwiseOptimizer.compute_updates`."""
        means, squares = moments
        (beta1, beta2), (nu1, nu2) = group["betas"], group["nus"]
        foreach_lerp_(means, gradients, 1 - beta1)
        add_to_mean_squares(squares, gradients, beta2)
        updates: Tensors = foreach_div(means, 1 - beta1 ** (step + 1))
        denominators = foreach_div(squares, 1 - beta2 ** (step + 1))
        if nu1 != 1:
            updates = foreach_lerp(gradients, updates, nu1)
        if nu2 != 1:
            denominators = foreach_lerp(foreach_mul(gradients, gradients), denominators, nu2)
        denominators = foreach_sqrt(denominators)
        foreach_add_(denominators, group["eps"])
        foreach_div_(updates, denominators)
        return updates
