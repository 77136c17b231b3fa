"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from typing import Any

from ....kernels.torch_private import foreach_lerp, foreach_lerp_, foreach_sign_
from .base import ElementwiseOptimizer, Tensors


class LionOptimizer(ElementwiseOptimizer):
    """Moves every element by the rate, in the direction of a mean gradient's sign."""

    moments = ("exp_avg",)

    def update(
        self,
        group: dict[str, Any],
        step: int,
        weights: Tensors,
        gradients: Tensors,
        *moments: Tensors,
    ) -> None:
        """Change weights and moments; see `ElementwiseOptimizer.update`."""
        (means,) = moments
        beta1, beta2 = group["betas"]
        updates = foreach_lerp(means, gradients, 1 - beta1)
        foreach_sign_(updates)
        self.subtract(group, weights, updates)
        foreach_lerp_(means, gradients, 1 - beta2)
