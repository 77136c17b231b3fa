"""A projection with an adapter (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..language_model import Constant, Normal
from .adapter_names import DOWN, UP
from .linear import Linear


class AdaptedLinear(Linear):
    """x W^T + alpha / rank * (x A^T) B^T (equation 3), where only A and B are trained.

    The weight keeps its name; A and B are `lora_a` [rank, in] and `lora_b` [out, rank] beside it.

    Args:
        base: the projection, whose weight it takes.
        rank: width of the adapter.
        alpha: see above.
    """

    def __init__(self, base: Linear, rank: int, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight = base.weight
        self.alpha = alpha
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        narrow = F.linear(x, self.lora_a.to(x.dtype))
        return super().forward(x) + F.linear(narrow, self.lora_b.to(x.dtype)) * self.scale

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return how A and B start: B is zero, so that the model starts as it was.

        A has the standard deviation that `nn.Linear` starts with.
        """
        return {DOWN: Normal(1 / math.sqrt(3 * self.in_features)), UP: Constant(0.0)}
