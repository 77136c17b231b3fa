"""Weights that take the dtype of what they are applied to."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A projection, computed in the dtype of its input.

    Attributes:
        product: how x and weight are multiplied; as `torch.nn.functional.linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.product(x, self.weight.to(x.dtype), bias)
