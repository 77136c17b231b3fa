"""Grouped products in fp8 as torch operations: the reference on CPUs, Triton on GPUs.

`grouped_linear_fp8` multiplies in fp8 forward and for the gradient of its rows; the gradient of the
weights, which sums over a whole batch, stays in the dtype of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grouped_gemm.op import grouped_dw
from ..operators import operator
from ..quantize.op import quant_act, quant_weight
from . import reference

_kept: dict[Any, list[Tensor]] | None = None
# Global, because the backward pass runs in threads of autograd's.


@contextmanager
def weights_unchanged() -> Iterator[None]:
    """Let each `StepWeights` be quantised once inside: no weight may change before its last use."""
    global _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = None


@dataclass(frozen=True, eq=False)
class StepWeights:
    """Multiplies rows by a layer's weights, which are quantised once for all passes of a step.

    Inside of `weights_unchanged`, both layouts are kept, two bytes for each weight. Outside of it,
    without gradients (an evaluation may swap in averaged weights) and in compiled code, every call
    quantises.

    Attributes:
        is_kept: whether weights are kept at all. Where ranks hold shards and gather the weights for
            each pass, copies of the gathered ones would take the memory that sharding frees.
    """

    is_kept: bool = True

    def __call__(self, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        """Return what `grouped_linear_fp8` does; the layer's weights have different shapes."""
        is_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        key = (self, w.shape) if self.is_kept and is_training else None
        return grouped_linear_fp8(x, w, offs, key=key)


def grouped_linear_fp8(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    *,
    trans_w: bool = True,
    pow2: bool = False,
    key: Any = None,
) -> Tensor:
    """Return [M, N] in the dtype of x: its rows times the weight of their group.

    Args:
        x: [M, K], K a multiple of 128.
        w: [E, N, K] if trans_w, else [E, K, N]; N a multiple of 128.
        offs: int32 [E], where each group ends.
        trans_w: whether a weight is transposed, as in `torch.nn.Linear`.
        pow2: round scales up to powers of two.
        key: names the weight among those that `weights_unchanged` keeps; None: it is not kept.
    """
    y: Tensor = _GroupedLinear.apply(x, w, offs, trans_w, pow2, key)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, pow2: bool, key: Any
    ) -> Tensor:
        reference.check_shapes(x, w if trans_w else w.mT)
        # Saved as they came; fp8 copies are made again (`_quantize`).
        ctx.save_for_backward(x, w, offs)
        ctx.trans_w, ctx.pow2, ctx.key = trans_w, pow2, key
        return _product(x, w, offs, trans_w, pow2, x.dtype, key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offs = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, w, offs, not ctx.trans_w, ctx.pow2, x.dtype, ctx.key)
        if ctx.needs_input_grad[1]:
            grad = grad.to(x.dtype)
            left, right = (grad, x) if ctx.trans_w else (x, grad)
            # Not in fp8: it sums over a whole batch.
            grad_w = grouped_dw(left, right, offs, out_dtype=w.dtype)
        return grad_x, grad_w, None, None, None, None


def _product(
    x: Tensor, w: Tensor, offs: Tensor, trans_w: bool, pow2: bool, out_dtype: torch.dtype, key: Any
) -> Tensor:
    x8, x_scale = quant_act(x, pow2=pow2)
    w8, w_scale = _quantize(w, trans_w, pow2, key)
    return grouped_mm_fp8(x8, x_scale, w8, w_scale, offs, out_dtype=out_dtype)


def _quantize(w: Tensor, trans_w: bool, pow2: bool, key: Any) -> Sequence[Tensor]:
    """Return a weight in fp8 and its scales; tensor cores read both operands along the sum."""
    if _kept is None or key is None:
        # Kept for the backward pass alone, they would cost half as much memory again.
        return quant_weight(w, pow2=pow2, layout="row" if trans_w else "column")
    if key not in _kept:
        _kept[key] = list(quant_weight(w.detach(), pow2=pow2, layout="both"))
    return _kept[key][:2] if trans_w else _kept[key][2:]


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
