"""Grouped products in fp8 as torch operations: the reference on CPUs, Triton on GPUs.

`grouped_linear_fp8` multiplies in fp8 forward and for the gradient of its rows; the gradient of the
weights, which sums over a whole batch, stays in the dtype of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grouped_gemm.op import grouped_dw
from ..operators import operator
from ..quantize.op import quant_act, quant_weight
from . import reference


def grouped_linear_fp8(
    x: Tensor, w: Tensor, offs: Tensor, *, trans_w: bool = True, pow2: bool = False
) -> Tensor:
    """Return [M, N] in the dtype of x: its rows times the weight of their group.

    Args:
        x: [M, K], K a multiple of 128.
        w: [E, N, K] if trans_w, else [E, K, N]; N a multiple of 128.
        offs: int32 [E], where each group ends.
        trans_w: whether a weight is transposed, as in `torch.nn.Linear`.
        pow2: round scales up to powers of two.
    """
    y: Tensor = _GroupedLinear.apply(x, w, offs, trans_w, pow2)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, pow2: bool) -> Tensor:
        reference.check_shapes(x, w if trans_w else w.mT)
        # Saved as they came; fp8 copies are made again (`_product`).
        ctx.save_for_backward(x, w, offs)
        ctx.trans_w, ctx.pow2 = trans_w, pow2
        return _product(x, w, offs, trans_w, pow2, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offs = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, w, offs, not ctx.trans_w, ctx.pow2, x.dtype)
        if ctx.needs_input_grad[1]:
            grad = grad.to(x.dtype)
            left, right = (grad, x) if ctx.trans_w else (x, grad)
            # Not in fp8: it sums over a whole batch.
            grad_w = grouped_dw(left, right, offs, out_dtype=w.dtype)
        return grad_x, grad_w, None, None, None


def _product(
    x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, pow2: bool, out_dtype: torch.dtype
) -> Tensor:
    """Return the product of what is quantised here: kept, weights would cost half as much again."""
    x8, x_scale = quant_act(x, pow2=pow2)
    # Tensor cores read both operands along the sum.
    w8, w_scale = quant_weight(w, pow2=pow2, layout="row" if trans_w else "column")
    return grouped_mm_fp8(x8, x_scale, w8, w_scale, offs, out_dtype=out_dtype)


@operator(
    "grouped_mm_fp8",
    cuda="grouped_gemm_fp8.triton:grouped_mm_fp8",
    fake=lambda x, x_scale, w, w_scale, offs, out_dtype=torch.bfloat16: x.new_empty(
        (x.shape[0], w.shape[1]), dtype=out_dtype
    ),
)
def grouped_mm_fp8(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return each row times the weight of its group; see `reference.grouped_mm_fp8`."""
    return reference.grouped_mm_fp8(x, x_scale, w, w_scale, offs, out_dtype=out_dtype)
