"""Permutations of rows in Triton; see `reference` for what they compute.

A program takes one token: its row is read or written once, whatever the number of experts, and
its sums are taken in the order of its choices, so that they repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Eight numbers a thread with four warps: 16 bytes of bf16, the widest load.
COLUMNS = 1024


@triton.jit
def _permute_kernel(
    x_ptr, slot_ptr, weight_ptr, out_ptr, D, A, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr
):
    # int64: T * D passes 2^31 in long batches.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + token * D + column, mask=column < D, other=0.0)
    for choice in range(0, A):
        row = tl.load(slot_ptr + token * A + choice).to(tl.int64)
        value = x
        if WEIGHTED:
            weight = tl.load(weight_ptr + token * A + choice).to(tl.float32)
            # Rounded once, to the dtype of the row.
            value = (x.to(tl.float32) * weight).to(x.dtype)
        tl.store(out_ptr + row * D + column, value, mask=column < D)


@triton.jit
def _unpermute_kernel(
    y_ptr, slot_ptr, weight_ptr, out_ptr, D, A, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Summed in fp32 in the order of the choices: the same bits each time.
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(0, A):
        row = tl.load(slot_ptr + token * A + choice).to(tl.int64)
        value = tl.load(y_ptr + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weight_ptr + token * A + choice).to(tl.float32)
        total += value
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


@triton.jit
def _row_dots_kernel(x_ptr, y_ptr, slot_ptr, out_ptr, D, A, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    choice = tl.program_id(1)
    row = tl.load(slot_ptr + token * A + choice).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + token * D + column, mask=column < D, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        total += x * y
    # Lanes are summed once at the end, not in each step.
    tl.store(out_ptr + token * A + choice, tl.sum(total, 0))


def permute(x: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return each token's row in the places of its choices; see `reference.permute`."""
    x, slot = x.contiguous(), slot.contiguous()
    (T, A), D = slot.shape, x.shape[1]
    out = torch.empty((T * A, D), dtype=x.dtype, device=x.device)
    weight = None if weight is None else weight.contiguous()
    if out.numel():
        _permute_kernel[(T, triton.cdiv(D, COLUMNS))](
            x, slot, weight, out, D, A, WEIGHTED=weight is not None, COLUMNS=COLUMNS
        )
    return out


def unpermute(y: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum of rows; see `reference.unpermute`."""
    y, slot = y.contiguous(), slot.contiguous()
    (T, A), D = slot.shape, y.shape[1]
    out = torch.empty((T, D), dtype=y.dtype, device=y.device)
    weight = None if weight is None else weight.contiguous()
    if out.numel():
        _unpermute_kernel[(T, triton.cdiv(D, COLUMNS))](
            y, slot, weight, out, D, A, WEIGHTED=weight is not None, COLUMNS=COLUMNS
        )
    return out


def row_dots(x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
    """Return the products of rows with their token's; see `reference.row_dots`."""
    x, y, slot = x.contiguous(), y.contiguous(), slot.contiguous()
    T, A = slot.shape
    out = torch.empty((T, A), dtype=torch.float32, device=x.device)
    if out.numel():
        _row_dots_kernel[(T, A)](x, y, slot, out, x.shape[1], A, COLUMNS=COLUMNS)
    return out
