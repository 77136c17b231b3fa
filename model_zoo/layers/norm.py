"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.choose import Kernels


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with a learned scale."""

    def __init__(self, dim: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.kernel = kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., D]."""
        return self.kernel(x, self.weight, self.eps)
