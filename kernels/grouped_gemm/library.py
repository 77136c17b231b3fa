"""Products of groups of rows by torch's own grouped product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import ALIGNMENT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: Tensor, *widths: int) -> bool:
    """Return whether torch has products of rows of this dtype, and of operands so wide."""
    return x.dtype in DTYPES and all(width * x.element_size() % ALIGNMENT == 0 for width in widths)


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Return [M, N], each row times the weight of its group; rows behind the last are 0.

    Waits for the counts: for CPUs.

    Args:
        x: [M, K].
        w: [E, K, N].
        offs: int32 [E], where each group ends.
    """
    y = F.grouped_mm(x, w, offs=offs)
    y[int(offs[-1]) :] = 0
    return y


def grouped_dw(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """Return [E, N, K]: dy.T @ x of each group's rows; 0 for no rows.

    Args:
        dy: [M, N].
        x: [M, K].
        offs: int32 [E], where each group ends.
    """
    return F.grouped_mm(dy.mT, x, offs=offs)
