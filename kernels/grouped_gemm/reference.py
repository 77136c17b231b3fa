"""Products of groups of rows, each with its expert's weight (Megablocks, arXiv:2211.15841).

Rows that belong together lie together; `offs` says where each group ends. A group may have any
number of rows, also none.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    *,
    trans_w: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [M, N]: each row times the weight of its group, summed in fp32 at least.

    Args:
        x: [M, K].
        w: [E, N, K] if trans_w, else [E, K, N]; of the dtype of x.
        offs: int32 [E], where each group ends; rows behind the last are 0 in the result.
        trans_w: whether a weight is transposed, as in `torch.nn.Linear`.
        out_dtype: of the result; left out: that of x.
    """
    # A view: nothing is copied.
    w = w.mT if trans_w else w
    dtype = out_dtype or x.dtype
    y = x.new_zeros((x.shape[0], w.shape[2]), dtype=dtype)
    groups = _slices(offs)
    lengths = {group.stop - group.start for group in groups}
    # Groups of one length are a single batched product, far faster on CPUs than a loop.
    if len(lengths) == 1 and (length := lengths.pop()):
        rows = len(w) * length
        product = _product(x[:rows].view(len(w), length, x.shape[1]), w, dtype)
        y[:rows] = product.flatten(0, 1)
        return y
    for expert, rows in zip(w, groups, strict=True):
        y[rows] = _product(x[rows], expert, dtype)
    return y


def grouped_dw(
    dy: Tensor, x: Tensor, offs: Tensor, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return [E, N, K]: dy.T @ x of each group's rows, summed in fp32 at least; 0 for no rows.

    With `trans_w=False` in `grouped_mm` the gradient of w is this with dy and x exchanged.

    Args:
        dy: [M, N].
        x: [M, K], of the dtype of dy.
        offs: int32 [E], where each group ends.
        out_dtype: of the result.
    """
    dw = dy.new_zeros((len(offs), dy.shape[1], x.shape[1]), dtype=out_dtype)
    for expert, rows in zip(dw, _slices(offs), strict=True):
        expert.copy_(_product(dy[rows].mT, x[rows], out_dtype))
    return dw


def add_grouped_dw(total: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    """Add `grouped_dw` to a gradient [E, N, K] that is there already, in its own dtype.

    Args:
        total: [E, N, K]; changed in place.
        dy: [M, N].
        x: [M, K], of the dtype of dy.
        offs: int32 [E], where each group ends.
    """
    # A bf16 gradient is widened for the sum and rounded once.
    wide = torch.promote_types(total.dtype, torch.float32)
    total.copy_(total.to(wide) + grouped_dw(dy, x, offs, out_dtype=wide))


def _slices(offs: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *offs.tolist()])]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == a.dtype:
        return a @ b
    wide = torch.promote_types(a.dtype, dtype)
    return (a.to(wide) @ b.to(wide)).to(dtype)
