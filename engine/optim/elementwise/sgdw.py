"""SGD with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 1)."""

from __future__ import annotations

from typing import Any

from ....kernels.torch_private import foreach_add, foreach_add_, foreach_mul_
from .base import ElementwiseOptimizer, Tensors


class SGDW(ElementwiseOptimizer):
    """Momentum that the decay of the weights does not enter."""

    moments = ("momentum_buffer",)

    def update(
        self,
        group: dict[str, Any],
        step: int,
        weights: Tensors,
        gradients: Tensors,
        *moments: Tensors,
    ) -> None:
        """Change weights and moments; see `ElementwiseOptimizer.update`."""
        (velocities,) = moments
        momentum = group["momentum"]
        foreach_mul_(velocities, momentum)
        foreach_add_(velocities, gradients)
        updates = velocities
        if group["nesterov"]:
            updates = foreach_add(gradients, velocities, alpha=momentum)
        self.subtract(group, weights, updates)
