"""SGD with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 1)."""

from __future__ import annotations

from ....kernels.torch_private import foreach_add, foreach_add_, foreach_mul_
from .base import ElementwiseOptimizer, Group, Tensors


class SGDWOptimizer(ElementwiseOptimizer):
    """SGD whose weight decay does not enter the momentum."""

    moments = ("momentum_buffer",)

    def compute_updates(
        self, group: Group, step: int, gradients: Tensors, *moments: Tensors
    ) -> Tensors:
        """Return the updates; see `ElementwiseOptimizer.compute_updates`."""
        (velocities,) = moments
        momentum = group["momentum"]
        foreach_mul_(velocities, momentum)
        foreach_add_(velocities, gradients)
        updates = velocities
        if group["nesterov"]:
            updates = foreach_add(gradients, velocities, alpha=momentum)
        return updates
