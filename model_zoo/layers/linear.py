"""Weights that take the dtype of what they are applied to."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A projection without bias, computed in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(x, self.weight.to(x.dtype))
