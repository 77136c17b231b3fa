"""MARS-AdamW (Yuan et al. 2024, arXiv:2411.10438, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....kernels.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    foreach_mul,
    foreach_norm,
)
from ...core.local import local, norm_dtype, sum_over_shards
from .base import Group, Tensors
from .qhadam import QHAdamOptimizer


class MARSOptimizer(QHAdamOptimizer):
    """AdamW on gradients whose variance is reduced by the gradient of the step before.

    The gradient before the first one counts as 0, as in the code of the paper's authors. The
    corrected gradient of a parameter is scaled down to a norm of 1 if its norm is larger. That is
    the norm of the whole parameter: its shards are summed over their ranks.
    """

    moments = ("exp_avg", "exp_avg_sq", "last_grad")
    takes_shards = False  # the norm of a DTensor needs the ranks of the other shards

    def __init__(self, groups: Sequence[Group], **defaults: Any) -> None:
        super().__init__(groups, nus=(1.0, 1.0), **defaults)

    def update(
        self, group: Group, step: int, weights: Tensors, gradients: Tensors, moments: list[Tensors]
    ) -> None:
        """Change weights and moments in place; see `ElementwiseOptimizer.update`."""
        *means, last = [list(map(local, tensors)) for tensors in moments]
        gradients = list(map(local, gradients))
        beta1 = group["betas"][0]
        weight = group["gamma"] * beta1 / (1 - beta1)
        corrected = foreach_mul(gradients, 1 + weight)
        foreach_add_(corrected, last, alpha=-weight)
        norms = torch.stack(foreach_norm(corrected, dtype=norm_dtype(corrected)))
        squares = sum_over_shards(weights, norms.square().unbind())
        norms = torch.stack(squares).sqrt().clamp(min=1.0)
        foreach_div_(corrected, list(norms.to(corrected[0].dtype).unbind()))
        foreach_copy_(last, gradients)
        super().update(group, step, list(map(local, weights)), corrected, means)
