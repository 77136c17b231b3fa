"""SwiGLU in one pass; see the reference for the formulas."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import require_float

# 16 numbers a thread with eight warps, and up to half of that in a row.
_TILE = 2**12
_WIDEST = 2**11


def forward(gate: Tensor, up: Tensor, row_weight: Tensor | None) -> Tensor:
    """Return silu(gate) * up, times each row's weight; gate and up may be parts of wider rows."""
    require_float(gate, up)
    gate_TF, up_TF = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    T, F = gate_TF.shape
    if out.numel():
        block, rows = _tile(F)
        _swiglu[(triton.cdiv(T, rows),)](
            gate_TF,
            up_TF,
            # Any pointer: without a weight it is not read.
            gate if row_weight is None else row_weight.contiguous(),
            out,
            gate_TF.stride(0),
            up_TF.stride(0),
            T,
            F,
            HAS_WEIGHT=row_weight is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=8,
        )
    return out


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and row weight (empty without one)."""
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    grad_weight = backward_into(grad, gate, up, row_weight, grad_gate, grad_up)
    return grad_gate, grad_up, grad_weight


def backward_into(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    row_weight: Tensor | None,
    grad_gate: Tensor,
    grad_up: Tensor,
) -> Tensor:
    """Write the gradients of gate and up; return that of the row weight (empty without one).

    What is written to may be parts of wider rows, with the same stride.
    """
    require_float(gate, up)
    grad_TF, gate_TF, up_TF = _rows(grad), _rows(gate), _rows(up)
    grad_weight = gate.new_empty(0)
    if row_weight is not None:
        row_weight = row_weight.contiguous()
        # Zeros, since rows of no columns are not visited.
        grad_weight = torch.zeros_like(row_weight)
    T, F = gate_TF.shape
    if gate.numel():
        block, rows = _tile(F)
        _swiglu_backward[(triton.cdiv(T, rows),)](
            grad_TF,
            gate_TF,
            up_TF,
            gate if row_weight is None else row_weight,
            grad_gate,
            grad_up,
            grad_weight,
            grad_TF.stride(0),
            gate_TF.stride(0),
            up_TF.stride(0),
            grad_gate.stride(-2) if grad_gate.dim() > 1 else F,
            T,
            F,
            HAS_WEIGHT=row_weight is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=8,
        )
    return grad_weight


def _rows(x: Tensor) -> Tensor:
    """Return [T, F] whose rows are contiguous each, without a copy where they are already."""
    x_TF = x.reshape(-1, x.shape[-1])
    return x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()


def _tile(F: int) -> tuple[int, int]:
    """Return columns and rows of a tile of 16 values a thread."""
    block = min(_WIDEST, max(16, triton.next_power_of_2(F)))
    return block, _TILE // block


@triton.jit
def _swiglu(
    gate_ptr,
    up_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    T,
    F,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # int64: row times stride passes 2^31 for long batches.
    wide = row.to(tl.int64)[:, None]
    for first in range(0, F, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = (row < T)[:, None] & (column < F)
        gate = tl.load(gate_ptr + wide * gate_stride + column, mask=mask, other=0.0)
        up = tl.load(up_ptr + wide * up_stride + column, mask=mask, other=0.0)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        # In fp32 and rounded once, where torch rounds after silu and again after the product.
        out = gate * tl.sigmoid(gate) * up
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + row, mask=row < T, other=0.0).to(tl.float32)
            out *= weight[:, None]
        tl.store(out_ptr + wide * F + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    weight_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    grad_weight_ptr,
    grad_stride,
    gate_stride,
    up_stride,
    out_stride,
    T,
    F,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide = row.to(tl.int64)[:, None]
    # A program has whole rows, so that the weight's gradient needs no atomics.
    grad_weight = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, F, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = (row < T)[:, None] & (column < F)
        grad = tl.load(grad_ptr + wide * grad_stride + column, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + wide * gate_stride + column, mask=mask, other=0.0)
        up = tl.load(up_ptr + wide * up_stride + column, mask=mask, other=0.0)
        grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if HAS_WEIGHT:
            grad_weight += tl.sum(grad * silu * up, axis=1)
            weight = tl.load(weight_ptr + row, mask=row < T, other=0.0).to(tl.float32)
            grad *= weight[:, None]
        # silu' = sigmoid + silu * (1 - sigmoid).
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        offset = wide * out_stride + column
        tl.store(grad_gate_ptr + offset, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
        grad_up = grad * silu
        tl.store(grad_up_ptr + offset, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        grad_weight = grad_weight.to(grad_weight_ptr.dtype.element_ty)
        tl.store(grad_weight_ptr + row, grad_weight, mask=row < T)
