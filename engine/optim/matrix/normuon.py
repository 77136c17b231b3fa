"""NorMuon (Li et al. 2025, arXiv:2510.05491, algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.torch_private import foreach_copy_
from .base import MatrixTask
from .muon import MuonOptimizer


class NorMuonOptimizer(MuonOptimizer):
    """Muon whose rows are divided by the root of a running mean of their squares.

    Each rank holds the running means of all matrices, one number a row, so that any rank can own
    any matrix in the next step.
    """

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return nearly orthogonal matrices with normalized rows, [N, rows, columns]."""
        this, beta = task.round, task.group["beta2"]
        directions = super().compute_updates(task, matrices)
        states = self.read_states(task, "row_squares", ())
        owned = states[this.first_owned : this.first_owned + this.num_owned]
        every = states[0].new_zeros(len(states), this.shape[0])
        updates = directions
        if owned:
            squares = directions.to(every.dtype).square().mean(2)
            means = torch.lerp(squares, torch.stack(owned), beta)
            every[this.first_owned : this.first_owned + this.num_owned] = means
            updates = directions / (means.sqrt() + task.group["eps"]).to(directions).unsqueeze(2)
            norms = [
                torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (directions, updates)
            ]
            updates = updates * (norms[0] / norms[1].clamp(min=task.group["eps"]))
        foreach_copy_(states, list(self.sum_over_ranks(every).unbind()))
        return updates
