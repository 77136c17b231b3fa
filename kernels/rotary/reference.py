"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + K / 2) of each head by their position's angles, in fp32 at least.

    The pairing is Hugging Face's (halves), not the paper's (neighbours): the two differ by a fixed
    permutation of the rows of the query and key weights.

    Args:
        x: [B, S, H, K].
        cos: [S, 1, K / 2] or [B, S, 1, K / 2], fp32.
        sin: like cos.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
