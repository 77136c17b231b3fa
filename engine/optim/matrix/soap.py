"""SOAP (Vyas et al. 2024, arXiv:2409.11321), and SOAP whose updates are orthogonalized."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from ....kernels.torch_private import foreach_copy_
from ..elementwise.base import Group, Tensors
from .base import MatrixOptimizer, MatrixTask
from .eigenbasis import find_basis, update_basis
from .muon import MuonOptimizer
from .orthogonalize import orthogonalize

SIDES = ("row", "column")


class SOAPOptimizer(MatrixOptimizer):
    """Runs Adam in the eigenbases of the running covariances of rows and of columns.

    Gradients travel, and the rank that owns a matrix has all of the state: the covariances, their
    bases, and the two moments in these bases. The first gradient of a matrix makes the bases and
    changes no weight, as in the code of the authors.
    """

    @property
    def period(self) -> int:
        """The number of steps of which one updates the bases."""
        return max(int(group.get("basis_interval", 1)) for group in self.param_groups)

    def select(self, group: Group) -> list[list[int]]:
        """Return the places of parameters that have had equally many gradients, list by list."""
        found = defaultdict[int, list[int]](list)
        for place, weight in enumerate(group["params"]):
            if weight.grad is not None:
                found[self.state[weight].get("step", 0)].append(place)
        return list(found.values())

    def update_momenta(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        """Count the gradients, and return them: the owners of matrices have the momenta."""
        for weight in weights:
            self.state[weight]["step"] = self.state[weight].get("step", 0) + 1
        return gradients

    def num_updates(self, task: MatrixTask) -> int:
        """Return how often the weights of a round have changed, the pending update included."""
        return int(self.state[task.weights[0]]["step"]) - 1

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return Adam's directions, [N, rows, columns], of gradients."""
        group, shape = task.group, task.round.shape
        sides = [side for side, size in enumerate(shape) if size <= group["max_factor_dim"]]
        shapes = dict.fromkeys(("mean", "mean_square"), shape)
        for side in sides:
            square = shape[side], shape[side]
            shapes |= {f"{SIDES[side]}_{key}": square for key in ("covariance", "basis")}
        if not task.round.num_owned:
            return matrices
        states = self.read_owned(task, shapes)
        stacks = {key: torch.stack(found) for key, found in states.items()}
        covariances = {side: stacks[f"{SIDES[side]}_covariance"] for side in sides}
        bases = {side: stacks[f"{SIDES[side]}_basis"] for side in sides}
        updates, count = torch.zeros_like(matrices), self.num_updates(task)
        if count:
            updates = self._step_in_bases(group, count, matrices, stacks, bases)
        for side in sides:
            product = matrices @ matrices.mT if side == 0 else matrices.mT @ matrices
            covariances[side].lerp_(product, 1 - group["betas"][1])
            if not count:
                bases[side].copy_(find_basis(covariances[side]))
        if count and count % group["basis_interval"] == 0:
            _update_bases(stacks, covariances, bases)
        for key, found in states.items():
            foreach_copy_(found, list(stacks[key].unbind()))
        return updates

    def _step_in_bases(
        self,
        group: Group,
        count: int,
        gradients: Tensor,
        stacks: dict[str, Tensor],
        bases: dict[int, Tensor],
    ) -> Tensor:
        """Update the moments by gradients, and return Adam's directions."""
        rotated = _rotate(gradients, bases)
        beta1, beta2 = group["betas"]
        mean = stacks["mean"].lerp_(rotated, 1 - beta1)
        square = stacks["mean_square"].lerp_(rotated.square(), 1 - beta2)
        correction = math.sqrt(1 - beta2**count) / (1 - beta1**count)
        directions = mean / square.sqrt().add_(group["eps"]) * correction
        return _rotate_back(directions, bases)

    def scale_of(self, group: Group, rows: int, columns: int) -> float:
        """Return 1: an update is as large as Adam's."""
        return 1.0

    def apply(self, task: MatrixTask, weights: Tensors, updates: Tensors) -> None:
        """Change pieces of this rank's weights, but for the first gradient."""
        if self.num_updates(task):
            super().apply(task, weights, updates)


class SOAPMuonOptimizer(SOAPOptimizer):
    """SOAP whose updates are orthogonalized, as Muon's are (Vyas 2026)."""

    scale_of = MuonOptimizer.scale_of

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return nearly orthogonal matrices, [N, rows, columns], of gradients."""
        updates = super().compute_updates(task, matrices)
        if task.group["multiplies_in_bf16"]:
            updates = updates.to(torch.bfloat16)
        return orthogonalize(updates, task.group["ns_steps"])


def _rotate(matrices: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """Return matrices in bases of their rows (0) and columns (1), where there are any."""
    if 0 in bases:
        matrices = bases[0].mT @ matrices
    return matrices @ bases[1] if 1 in bases else matrices


def _rotate_back(matrices: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """Return what `_rotate` made of matrices from these matrices."""
    if 0 in bases:
        matrices = bases[0] @ matrices
    return matrices @ bases[1].mT if 1 in bases else matrices


def _update_bases(
    stacks: dict[str, Tensor], covariances: dict[int, Tensor], bases: dict[int, Tensor]
) -> None:
    """Update bases in place, and the moments, which follow them."""
    mean = _rotate_back(stacks["mean"], bases)
    for side, basis in bases.items():
        updated, order = update_basis(covariances[side], basis)
        basis.copy_(updated)
        order = order.unsqueeze(2 - side)
        stacks["mean_square"].copy_(stacks["mean_square"].take_along_dim(order, side + 1))
    stacks["mean"].copy_(_rotate(mean, bases))
