"""Norms, products and distances of pseudo-gradients over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.local import num_parts

Gradient = Mapping[str, Tensor]


class Geometry:
    """Measures pseudo-gradients whose shards lie on the ranks of one client's plan.

    Args:
        weights: the weights by name, whose placement tells how often a shard is held.
        num_holders: ranks that hold the same weights, whole or in parts.
        device: where collectives run.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], num_holders: int, device: torch.device
    ) -> None:
        # A tensor in `count` parts is held `num_holders / count` times over: it counts once.
        self._shares = {name: num_parts(each) / num_holders for name, each in weights.items()}
        self._device = device

    def product(self, one: Gradient, other: Gradient) -> float:
        """Return the inner product of two pseudo-gradients, summed in fp64."""
        names = [name for name in self._shares if name in one]
        return self._sum(
            {name: (one[name] * other[name]).sum(dtype=torch.float64) for name in names}
        )

    def norm(self, gradient: Gradient) -> float:
        """Return the L2 norm of a pseudo-gradient."""
        return sqrt(self.product(gradient, gradient))

    def squared_distances(self, gradients: Sequence[Gradient]) -> list[list[float]]:
        """Return the squared L2 distance between each two pseudo-gradients."""
        count = len(gradients)
        table = [[0.0] * count for _ in range(count)]
        for i, one in enumerate(gradients):
            for j in range(i):
                # Not from products: of two large updates that are near, all digits would cancel.
                parts = {
                    name: (one[name] - gradients[j][name]).square().sum(dtype=torch.float64)
                    for name in self._shares
                    if name in one
                }
                table[i][j] = table[j][i] = self._sum(parts)
        return table

    def _sum(self, parts: Mapping[str, Tensor]) -> float:
        """Return the sum over names and ranks of what each shard contributes."""
        scaled = [part * self._shares[name] for name, part in parts.items()]
        if not scaled:  # a round may merge nothing
            return 0.0
        total = torch.stack(scaled).sum().to(self._device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total)
