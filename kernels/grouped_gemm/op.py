"""The grouped products as torch operations: torch's or the reference on CPUs, Triton on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import library, reference


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    *,
    trans_w: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return each row times the weight of its group; see `reference.grouped_mm`."""
    y: Tensor = _grouped_mm(x, w, offs, trans_w, out_dtype or x.dtype)
    return y


def library_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Return each row times the transposed weight of its group, by torch's own product if it can.

    What rows behind the last group get is not defined.

    Args:
        x: [M, K].
        w: [E, N, K], of the dtype of x.
        offs: int32 [E], where each group ends.
    """
    # The one dtype for which it neither waits for the counts nor is unknown to torch.compile.
    if x.is_cuda and x.dtype == torch.bfloat16 and library.takes(x, *w.shape[1:]):
        return F.grouped_mm(x, w.mT, offs=offs)
    return grouped_mm(x, w, offs)


def grouped_dw(
    dy: Tensor, x: Tensor, offs: Tensor, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return dy.T @ x of each group's rows; see `reference.grouped_dw`."""
    dw: Tensor = _grouped_dw(dy, x, offs, out_dtype)
    return dw


@torch.library.custom_op("trainer::add_grouped_dw", mutates_args=("total",), device_types="cpu")
def add_grouped_dw(total: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    """Add the products to a gradient; see `reference.add_grouped_dw`."""
    reference.add_grouped_dw(total, dy, x, offs)


@torch.library.custom_op("trainer::grouped_mm", mutates_args=(), device_types="cpu")
def _grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype == x.dtype == w.dtype and library.takes(x, *w.shape[1:]):
        return library.grouped_mm(x, w.mT if trans_w else w, offs)
    return reference.grouped_mm(x, w, offs, trans_w=trans_w, out_dtype=out_dtype)


@torch.library.custom_op("trainer::grouped_dw", mutates_args=(), device_types="cpu")
def _grouped_dw(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if out_dtype == dy.dtype == x.dtype and library.takes(x, dy.shape[1], x.shape[1]):
        return library.grouped_dw(dy, x, offs)
    return reference.grouped_dw(dy, x, offs, out_dtype=out_dtype)


@_grouped_mm.register_kernel("cuda")
def _(x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, out_dtype: torch.dtype) -> Tensor:
    from . import triton

    return triton.grouped_mm(x, w, offs, trans_w=trans_w, out_dtype=out_dtype)


@_grouped_dw.register_kernel("cuda")
def _(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    from . import triton_dw

    return triton_dw.grouped_dw(dy, x, offs, out_dtype=out_dtype)


@add_grouped_dw.register_kernel("cuda")
def _(total: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    from . import triton_dw

    triton_dw.add_grouped_dw(total, dy, x, offs)


@_grouped_mm.register_fake
def _(x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, out_dtype: torch.dtype) -> Tensor:
    if x.dtype != w.dtype:
        raise TypeError(f"rows are {x.dtype}, weights {w.dtype}: cast one of them")
    return x.new_empty(x.shape[0], w.shape[1 if trans_w else 2], dtype=out_dtype)


@_grouped_dw.register_fake
def _(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype)


@add_grouped_dw.register_fake
def _(total: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> None:
    return None


def _keep_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offs, ctx.trans_w, _ = inputs
    ctx.save_for_backward(x, w, offs)


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    grad, grad_x, grad_w = grad.to(x.dtype).contiguous(), None, None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_mm(grad, w, offs, trans_w=not ctx.trans_w)
    if ctx.needs_input_grad[1]:
        left, right = (grad, x) if ctx.trans_w else (x, grad)
        grad_w = grouped_dw(left, right, offs, out_dtype=w.dtype)
    return grad_x, grad_w, None, None, None


def _keep_dw(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _dw_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, offs = ctx.saved_tensors
    grad = grad.to(x.dtype).contiguous()
    grad_dy = grouped_mm(x, grad, offs) if ctx.needs_input_grad[0] else None
    grad_x = grouped_mm(dy, grad, offs, trans_w=False) if ctx.needs_input_grad[1] else None
    return grad_dy, grad_x, None, None


_grouped_mm.register_autograd(_mm_backward, setup_context=_keep_mm)
_grouped_dw.register_autograd(_dw_backward, setup_context=_keep_dw)
