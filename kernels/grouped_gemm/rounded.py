"""Grouped products in bf16 on CPUs, with lengths of groups rounded up so that few shapes occur.

oneDNN generates code for each shape of a bf16 product. Generating it takes longer than multiplying
a small group, and the code of the last 1,024 shapes takes 0.6 MiB each (oneDNN 3.12, its primitive
cache). Groups have other lengths in each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 32
"""rows of the shortest product"""


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Return each row times the weight of its group; rows behind the last group are 0.

    Args:
        x: [M, K].
        w: [E, K, N], of the dtype of x.
        offs: int32 [E], where each group ends.
    """
    y = x.new_empty(x.shape[0], w.shape[2])
    start = 0
    for expert, end in zip(w, offs.tolist(), strict=True):
        first, last = _window(start, end, len(x))
        if first == start:
            # Rows behind the group are those of the next ones, which are computed later.
            torch.mm(x[first:last], expert, out=y[first:last])
        else:
            y[start:end] = (x[first:last] @ expert)[start - first : end - first]
        start = end
    y[start:] = 0
    return y


def grouped_dw(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """Return [E, N, K]: dy.T @ x of each group's rows, 0 for no rows.

    Args:
        dy: [M, N].
        x: [M, K], of the dtype of dy.
        offs: int32 [E], where each group ends.
    """
    dw = dy.new_empty(len(offs), dy.shape[1], x.shape[1])
    ends = offs.tolist()
    for expert, start, end in zip(dw, [0, *ends], ends, strict=False):
        if start == end:
            expert.zero_()
            continue
        # No window reaches the rows behind the last group, which are undefined.
        first, last = _window(start, end, ends[-1])
        left, right = dy[first:last], x[first:last]
        # A zero in one factor is enough; the narrower one is the cheaper to copy.
        if left.shape[1] <= right.shape[1]:
            left = _clear_outside(left, start - first, end - first)
        else:
            right = _clear_outside(right, start - first, end - first)
        torch.mm(left.mT, right, out=expert)
    return dw


def _window(start: int, end: int, rows: int) -> tuple[int, int]:
    """Return the first row and the end of a product that holds the rows of a group.

    Lengths are multiples of 32 up to 256, then four between a power of two and the next. With fewer
    `rows` than that in all, the window is the group.
    """
    length = end - start
    step = max(LEAST, 1 << max((length - 1).bit_length() - 3, 0))
    length = -(-length // step) * step
    if length > rows:
        return start, end
    first = min(start, rows - length)
    return first, first + length


def _clear_outside(rows: Tensor, start: int, end: int) -> Tensor:
    """Return a copy in which only the rows from `start` to `end` are not 0."""
    if end - start == len(rows):
        return rows
    cleared = torch.zeros_like(rows)
    cleared[start:end] = rows[start:end]
    return cleared
