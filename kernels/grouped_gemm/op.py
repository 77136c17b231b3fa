"""The grouped products as torch operations: torch's or the reference on CPUs, Triton on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import FLOATS, operator
from . import reference, rounded

ALIGNMENT = 16
"""bytes; copies by hardware, and torch's grouped product, need rows that start at multiples"""


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    *,
    trans_w: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return each row times the weight of its group; see `reference.grouped_mm`."""
    return _grouped_mm(x, w, offs, trans_w, out_dtype or x.dtype)


def library_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Return each row times the transposed weight of its group, by torch's own product if it can.

    Rows after the last group are undefined in the result.

    Args:
        x: [M, K].
        w: [E, N, K], of the dtype of x.
        offs: int32 [E], where each group ends.
    """
    # With fp32 and fp16 on a GPU, F.grouped_mm (torch 2.13) waits for the counts, and torch.compile
    # does not know it.
    if x.is_cuda and x.dtype == torch.bfloat16 and _takes(x, *w.shape[1:]):
        return F.grouped_mm(x, w.mT, offs=offs)
    return grouped_mm(x, w, offs)


def grouped_dw(
    dy: Tensor, x: Tensor, offs: Tensor, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return dy.T @ x of each group's rows; see `reference.grouped_dw`."""
    return _grouped_dw(dy, x, offs, out_dtype)


def _takes(x: Tensor, *widths: int) -> bool:
    """Return whether torch multiplies groups of rows of this dtype, and of operands so wide."""
    return x.dtype in FLOATS and all(width * x.element_size() % ALIGNMENT == 0 for width in widths)


def _is_rounded(x: Tensor) -> bool:
    """Return whether products take rounded numbers of rows; see `rounded`."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


@operator(
    "add_grouped_dw",
    cuda="grouped_gemm.triton_dw:add_grouped_dw",
    mutates_args=("total",),
    fake=lambda total, dy, x, offs: None,
)
def add_grouped_dw(total: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    """Add the products to a gradient; see `reference.add_grouped_dw`."""
    reference.add_grouped_dw(total, dy, x, offs)


@operator("grouped_mm", cuda="grouped_gemm.triton:grouped_mm")
def _grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype != x.dtype or w.dtype != x.dtype or not _takes(x, *w.shape[1:]):
        return reference.grouped_mm(x, w, offs, trans_w=trans_w, out_dtype=out_dtype)
    w = w.mT if trans_w else w
    if _is_rounded(x):
        return rounded.grouped_mm(x, w, offs)
    y = F.grouped_mm(x, w, offs=offs)
    y[int(offs[-1]) :] = 0  # torch leaves the rows after the last group as they were in memory
    return y


@operator(
    "grouped_dw",
    cuda="grouped_gemm.triton_dw:grouped_dw",
    fake=lambda dy, x, offs, out_dtype: dy.new_empty(
        offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype
    ),
)
def _grouped_dw(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if out_dtype == dy.dtype == x.dtype and _takes(x, dy.shape[1], x.shape[1]):
        if _is_rounded(x):
            return rounded.grouped_dw(dy, x, offs)
        return F.grouped_mm(dy.mT, x, offs=offs)
    return reference.grouped_dw(dy, x, offs, out_dtype=out_dtype)


@_grouped_mm.register_fake
def _(x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, out_dtype: torch.dtype) -> Tensor:
    if x.dtype != w.dtype:
        raise TypeError(f"rows are {x.dtype}, weights {w.dtype}: cast one of them")
    return x.new_empty(x.shape[0], w.shape[1 if trans_w else 2], dtype=out_dtype)


def _save_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offs, ctx.trans_w, _ = inputs
    ctx.save_for_backward(x, w, offs)


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    # With a wide out_dtype the gradient comes in it; products take one dtype.
    grad, grad_x, grad_w = grad.to(x.dtype).contiguous(), None, None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_mm(grad, w, offs, trans_w=not ctx.trans_w)
    if ctx.needs_input_grad[1]:
        # The gradient has the layout of w: [E, N, K] is dy.T @ x, [E, K, N] is x.T @ dy.
        left, right = (grad, x) if ctx.trans_w else (x, grad)
        grad_w = grouped_dw(left, right, offs, out_dtype=w.dtype)
    return grad_x, grad_w, None, None, None


def _save_dw(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _dw_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, offs = ctx.saved_tensors
    grad = grad.to(x.dtype).contiguous()
    grad_dy = grouped_mm(x, grad, offs) if ctx.needs_input_grad[0] else None
    grad_x = grouped_mm(dy, grad, offs, trans_w=False) if ctx.needs_input_grad[1] else None
    return grad_dy, grad_x, None, None


_grouped_mm.register_autograd(_mm_backward, setup_context=_save_mm)
_grouped_dw.register_autograd(_dw_backward, setup_context=_save_dw)
