"""Muon on spheres, "hyperball" (arXiv:2606.16899): the norm of each matrix never changes."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
)
from ..elementwise.base import Group, Tensors
from .base import MatrixTask
from .muon import MuonOptimizer

LEAST = 1e-12
"""least norm by which a matrix is divided"""


class MuonHOptimizer(MuonOptimizer):
    """Moves each matrix by `lr` of its norm, and scales it back to the norm that it began with."""

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return orthogonalized matrices of norm 1, [N, rows, columns]."""
        updates = super().compute_updates(task, matrices)
        norms = torch.linalg.vector_norm(updates, dim=(1, 2), keepdim=True)
        return updates.div(norms.clamp(min=LEAST))

    def scale_of(self, group: Group, rows: int, columns: int) -> float:
        """Return 1: `apply` scales updates by the norm of each matrix."""
        return 1.0

    def apply(self, task: MatrixTask, weights: Tensors, updates: Tensors) -> None:
        """Move the pieces along the updates, and scale them."""
        states = self.read_states(task, "radius", (0,))
        radii = torch.stack(states)
        # Zeros before the first step; no branch on them, which would wait for the device.
        radii = torch.where(radii > 0, radii, self.norms_of(task, weights))
        foreach_copy_(states, list(radii.unbind()))
        own = [radii[number].to(weights[0]) for number, _ in task.round.held]
        if updates:
            updates = foreach_mul(updates, own)
            foreach_add_(weights, updates, alpha=-task.group["lr"])
        ratios = radii / self.norms_of(task, weights).clamp(min=LEAST)
        if weights:
            foreach_mul_(weights, [ratios[each].to(weights[0]) for each, _ in task.round.held])

    def norms_of(self, task: MatrixTask, pieces: Tensors) -> Tensor:
        """Return the norm of each matrix of a round, from the pieces of all ranks."""
        squares = torch.zeros(
            len(task.round.matrices), dtype=task.weights[0].dtype, device=self._device
        )
        if pieces:
            norms = torch.stack(foreach_norm(pieces)).to(self._device)
            numbers, copies = zip(*task.round.held, strict=True)
            # A piece that several ranks hold counts once.
            shares = norms.square() / torch.tensor(copies, device=self._device)
            squares.index_add_(0, torch.tensor(numbers, device=self._device), shares)
        return self.sum_over_ranks(squares).sqrt()
