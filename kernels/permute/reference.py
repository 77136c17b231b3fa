"""Rows of tokens sorted by expert, and their weighted sums (Megablocks, arXiv:2211.15841).

Three operations that are each other's gradients, to any order: of `permute` those are `unpermute`
and `row_dots`; of `unpermute`, `permute` and `row_dots`; of `row_dots`, `unpermute` and `permute`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return [T * A, D]: row slot[t, a] is weight[t, a] * x[t].

    Args:
        x: [T, D].
        slot: int32 [T, A], a permutation of the rows.
        weight: [T, A]; left out: 1.
    """
    rows = x.unsqueeze(1).expand(-1, slot.shape[1], -1)
    if weight is not None:
        rows = _wide(rows) * _wide(weight).unsqueeze(2)
    # Slots are a permutation: every row is written, and none twice.
    out = x.new_empty(slot.numel(), x.shape[1])
    return out.index_copy_(0, slot.flatten().long(), rows.flatten(0, 1).to(x.dtype))


def unpermute(y: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return [T, D]: the sum over a of weight[t, a] * y[slot[t, a]], in fp32 at least.

    Args:
        y: [T * A, D].
        slot: int32 [T, A], a permutation of the rows.
        weight: [T, A]; left out: 1.
    """
    rows = _wide(y)[slot.flatten().long()].view(*slot.shape, y.shape[1])
    if weight is not None:
        rows = rows * _wide(weight).unsqueeze(2)
    return rows.sum(1).to(y.dtype)


def row_dots(x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
    """Return [T, A], the dot product of x[t] and y[slot[t, a]], in fp32 at least.

    Args:
        x: [T, D].
        y: [T * A, D].
        slot: int32 [T, A], a permutation of the rows.
    """
    rows = _wide(y)[slot.flatten().long()].view(*slot.shape, y.shape[1])
    return (rows * _wide(x).unsqueeze(1)).sum(2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
