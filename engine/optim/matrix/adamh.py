"""AdamW on spheres, "hyperball" (arXiv:2606.16899): the norm of each matrix never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....kernels.torch_private import (
    foreach_add_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_sqrt,
)
from ..elementwise.base import Group, Tensors, add_to_mean_squares
from .base import MatrixTask
from .hyperball import LEAST, MuonHOptimizer


class AdamHOptimizer(MuonHOptimizer):
    """Moves each matrix along Adam's direction by `lr` of its norm, and scales it back.

    Each rank computes its own parts; ranks exchange norms alone.
    """

    def update_momenta(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        """Return Adam's directions of this rank's parts of the weights."""
        for weight in weights:
            if "exp_avg" not in self.state[weight]:
                moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
                self.state[weight].update(moments, updates=0)
        states = [self.state[weight] for weight in weights]
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        for state in states:
            state["updates"] += 1
        numbers = [state["updates"] for state in states]
        foreach_lerp_(means, gradients, 1 - beta1)
        add_to_mean_squares(squares, gradients, beta2)
        denominators = foreach_sqrt(foreach_div(squares, [1 - beta2**n for n in numbers]))
        foreach_add_(denominators, group["eps"])
        directions: Tensors = foreach_div(means, [1 - beta1**n for n in numbers])
        foreach_div_(directions, denominators)
        return directions

    def step_matrices(self, tasks: Sequence[MatrixTask]) -> None:
        """Move the parts of matrices that this rank holds."""
        for task in tasks:
            held = task.round.scatter.received
            updates = [task.momenta[piece.tensor][piece.slices] for piece in held]
            norms = self.norms_of(task, updates).clamp(min=LEAST)
            own = [norms[number].to(task.weights[0]) for number, _ in task.round.held]
            updates = foreach_div(updates, own) if updates else []
            weights = [task.weights[piece.tensor][piece.slices] for piece in held]
            self.apply(task, weights, updates)
