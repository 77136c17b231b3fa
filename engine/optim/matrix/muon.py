"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math

from torch import Tensor

from ..elementwise.base import Group
from .base import MatrixOptimizer, MatrixTask
from .orthogonalize import orthogonalize


class MuonOptimizer(MatrixOptimizer):
    """Momentum whose matrices are orthogonalized before each step."""

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return nearly orthogonal matrices, [N, rows, columns]."""
        return orthogonalize(matrices, task.group["ns_steps"])

    def scale_of(self, group: Group, rows: int, columns: int) -> float:
        """Return what multiplies an orthogonalized matrix.

        "match_rms_adamw" gives an update the root mean square that AdamW's usually has (Liu et al.
        2025, arXiv:2502.16982, section 2.2).
        """
        if group["scale"] == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
