"""Dropout whose random numbers are drawn from keys, the same on any number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Constants of SplitMix64 (Steele, Lea, Flood 2014, figure 16), as signed numbers.
STRIDE, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def drop(x: Tensor, rate: float, keys: Tensor | None, first_column: int = 0) -> Tensor:
    """Set a share of [B, S, D] to zero, and scale the others so that the mean stays.

    Args:
        x: [B, S, D].
        rate: the share.
        keys: [B, S] int64, from which the numbers are drawn: a position with the same key loses
            the same columns on every rank. None takes torch's generator.
        first_column: the number of the first column, where ranks share the columns.
    """
    if keys is None:
        return F.dropout(x, rate)
    columns = torch.arange(x.shape[-1], device=x.device).add_(first_column + 1) * STRIDE
    mixed = keys.unsqueeze(-1) + columns
    # Shifts keep the sign in torch, and SplitMix64's do not: a mask clears what comes in.
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * FIRST
    mixed = (mixed ^ (mixed >> 27 & (1 << 37) - 1)) * SECOND
    is_kept = (mixed >> 33 & (1 << 31) - 1) >= int(rate * 2**31)
    return x * is_kept / (1 - rate)
