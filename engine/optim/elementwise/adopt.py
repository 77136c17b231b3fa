"""ADOPT (Taniguchi et al. 2024, arXiv:2411.02853, algorithm 2) and its quasi-hyperbolic form."""

from __future__ import annotations

from ....kernels.torch_private import (
    foreach_addcmul_,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div,
    foreach_lerp,
    foreach_lerp_,
    foreach_sqrt,
)
from .base import ElementwiseOptimizer, Group, Tensors, add_to_mean_squares


class ADOPTOptimizer(ElementwiseOptimizer):
    """ADOPT: normalizes each gradient by the root mean square of the earlier gradients.

    Step 0 only initializes the mean square. `nu` is the weight of the running mean of the
    normalized gradients, and the newest normalized gradient gets 1 - nu; 1 is ADOPT, less is
    QHADOPT.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def compute_updates(
        self, group: Group, step: int, gradients: Tensors, *moments: Tensors
    ) -> Tensors | None:
        """Return the updates; see `ElementwiseOptimizer.compute_updates`."""
        means, squares = moments
        beta1, beta2 = group["betas"]
        if step == 0:
            foreach_addcmul_(squares, gradients, gradients)
            return None
        roots = foreach_sqrt(squares)
        foreach_clamp_min_(roots, group["eps"])
        normalized = foreach_div(gradients, roots)
        bound = step**0.25
        foreach_clamp_min_(normalized, -bound)
        foreach_clamp_max_(normalized, bound)
        foreach_lerp_(means, normalized, 1 - beta1)
        add_to_mean_squares(squares, gradients, beta2)
        nu = group.get("nu", 1.0)
        return means if nu == 1 else foreach_lerp(normalized, means, nu)
