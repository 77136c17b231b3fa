"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from ....kernels.torch_private import foreach_lerp, foreach_lerp_, foreach_sign_
from .base import ElementwiseOptimizer, Group, Tensors


class LionOptimizer(ElementwiseOptimizer):
    """Lion: each element of an update is the sign of a running mean of the gradients."""

    moments = ("exp_avg",)

    def compute_updates(
        self, group: Group, step: int, gradients: Tensors, *moments: Tensors
    ) -> Tensors:
        """Return the updates; see `ElementwiseOptimizer.compute_updates`."""
        (means,) = moments
        beta1, beta2 = group["betas"]
        updates: Tensors = foreach_lerp(means, gradients, 1 - beta1)
        foreach_sign_(updates)
        foreach_lerp_(means, gradients, 1 - beta2)
        return updates
