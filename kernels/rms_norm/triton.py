"""RMSNorm, alone or of a residual sum, in one pass; see the reference for the formulas."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import require_float

# More columns would not fit into the registers of 16 warps.
WIDEST = 2**14
# Four for each of the 132 multiprocessors of an H100: the weight's gradient is summed in this many
# parts, in the same order on every machine.
PROGRAMS = 528
_TILE = 2**11


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, the sum of x and the residual (empty without one) and the inverse RMS."""
    require_float(x)
    x = x.contiguous()
    out, total = torch.empty_like(x), x.new_empty(0 if residual is None else x.shape)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    D, T = x.shape[-1], inverse.numel()
    block, rows, warps = _tile(D)
    if T:
        _rms_norm[(triton.cdiv(T, rows),)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            out,
            total,
            inverse,
            T,
            D,
            eps,
            HAS_RESIDUAL=residual is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out, total, inverse


def backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight; that of the sum is added to the first."""
    require_float(x)
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    D, T = x.shape[-1], inverse.numel()
    block, rows, warps = _tile(D)
    programs = min(PROGRAMS, triton.cdiv(T, rows))
    # A row for each program, summed afterwards: atomics would add in any order.
    parts = torch.empty(programs, D, dtype=torch.float32, device=x.device)
    if T:
        _rms_norm_backward[(programs,)](
            grad,
            grad if grad_total is None else grad_total.contiguous(),
            x,
            weight,
            inverse,
            grad_x,
            parts,
            T,
            D,
            HAS_TOTAL=grad_total is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return grad_x, parts.sum(0).to(weight.dtype)


def _tile(D: int) -> tuple[int, int, int]:
    """Return columns and rows of a tile, and its warps: 16 values a thread where rows allow."""
    if D > WIDEST:
        raise ValueError(f"rows of {D} values are too wide: a row has to fit into registers")
    block = max(16, triton.next_power_of_2(D))
    rows = max(1, _TILE // block)
    return block, rows, min(16, max(4, block * rows // 512))


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    inverse_ptr,
    T,
    D,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < T)[:, None] & (column < D)
    offset = row.to(tl.int64)[:, None] * D + column
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, total, mask=mask)
        # The norm is that of the rounded sum, as the reference computes it.
        x = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)
    # Rounded as sharded mixed precision does, then widened for the product.
    weight = weight.to(x_ptr.dtype.element_ty).to(tl.float32)
    out = x * inverse[:, None] * weight
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(inverse_ptr + row, inverse, mask=row < T)


@triton.jit
def _rms_norm_backward(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    grad_x_ptr,
    parts_ptr,
    T,
    D,
    HAS_TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    part = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    # Programs take rows in turns, so that all have about as many.
    for first in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < T)[:, None] & (column < D)
        offset = row.to(tl.int64)[:, None] * D + column
        grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=row < T, other=0.0)[:, None]
        normal = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) * inverse
        part += grad * normal
        # Read again for each tile, from the cache: registers are for the rows.
        weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)
        weight = weight.to(x_ptr.dtype.element_ty).to(tl.float32)
        weighted = grad * weight
        # The part of the gradient along x is removed by the norm.
        along = tl.sum(weighted * normal, axis=1) / D
        grad_x = inverse * (weighted - normal * along[:, None])
        if HAS_TOTAL:
            grad_x += tl.load(grad_total_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    # The rows of a tile are summed once, at the end.
    out = parts_ptr + tl.program_id(0).to(tl.int64) * D + column
    tl.store(out, tl.sum(part, axis=0, keep_dims=True), mask=column < D)
