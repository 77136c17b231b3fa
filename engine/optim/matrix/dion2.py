"""Dion2 (Ahn, Amsel and Langford 2025, arXiv:2512.16928)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....kernels.torch_private import foreach_copy_
from ..elementwise.base import Group, Tensors
from .base import MatrixTask
from .muon import MuonOptimizer


class Dion2Optimizer(MuonOptimizer):
    """Orthogonalizes a share of the rows or columns of each momentum, those with the largest sums.

    The momentum is a sum of gradients, and only what has been orthogonalized decays, so that the
    rest counts later. The rank that owns a matrix has the momentum, because which rows are chosen
    depends on all of them.
    """

    def update_momenta(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        """Return the gradients: the owners of matrices have the momenta."""
        return gradients

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return updates that are nearly orthogonal in the chosen rows or columns, and else zero.

        The shorter dim is chosen from, by the sums of absolute values, as in the authors' code.
        """
        if not task.round.num_owned:
            return matrices
        group, (rows, columns) = task.group, task.round.shape
        (states,) = self.read_owned(task, {"momentum": task.round.shape}).values()
        momenta = torch.stack(states).add_(matrices)
        dim, size = (1, rows) if rows <= columns else (2, columns)
        sums = momenta.abs().sum(3 - dim)
        # In their order, because the sums of a product depend on it.
        chosen = sums.topk(math.ceil(group["fraction"] * size), dim=1).indices.sort(dim=1).values
        places = chosen.unsqueeze(3 - dim)
        part = momenta.take_along_dim(places, dim)
        places = places.expand_as(part)
        momenta.scatter_(dim, places, part * group["momentum"])
        foreach_copy_(states, list(momenta.unbind()))
        updates = super().compute_updates(
            task, part.to(torch.bfloat16 if group["multiplies_in_bf16"] else part.dtype)
        )
        return updates.new_zeros(matrices.shape).scatter_(dim, places, updates)
