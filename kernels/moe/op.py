"""Both halves of a mixture of SwiGLU experts: references on CPUs, Triton on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grouped_gemm.op import grouped_dw, grouped_mm
from ..operators import operator
from ..permute.op import permute, unpermute
from ..routing.reference import RoutingPlan
from . import reference


def moe_up_swiglu(x: Tensor, w13: Tensor, plan: RoutingPlan) -> Tensor:
    """Return silu(gate) * up of each choice's row, sorted by expert.

    Args:
        x: [T, K].
        w13: [E, 2 * I, K], of each expert the rows of the gate and then those of up.
        plan: of [T, A] choices.

    Returns:
        [T * A, I].
    """
    # Gate and up are twice as wide as the result: written only where a backward pass reads them.
    keeps = torch.is_grad_enabled() and (x.requires_grad or w13.requires_grad)
    return _up_swiglu(x, w13, plan.row_token, plan.offs, plan.slot, keeps)[0]


def moe_down_combine(h: Tensor, w2: Tensor, plan: RoutingPlan, weight: Tensor) -> Tensor:
    """Return the weighted sum of what a token's experts make of its rows; see the reference."""
    out: Tensor = _DownCombine.apply(h, w2, plan.offs, plan.slot, weight)  # type: ignore[no-untyped-call]
    return out


class _DownCombine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w2: Tensor, offs: Tensor, slot: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(h, w2, offs, slot, weight)
        return unpermute(grouped_mm(h, w2, offs), slot, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, w2, offs, slot, weight = ctx.saved_tensors
        # Unweighted: the weight is applied to the narrower rows below.
        rows = permute(grad.contiguous(), slot)
        through = grouped_mm(rows, w2, offs, trans_w=False)
        grad_h, weighted_h, grad_weight = _scale_by_router_weight(through, h, slot, weight)
        grad_w2 = None
        if ctx.needs_input_grad[1]:
            grad_w2 = grouped_dw(rows, weighted_h, offs, out_dtype=w2.dtype)
        return grad_h, grad_w2, None, None, grad_weight


@operator("moe_up_swiglu", cuda="moe.triton:up_swiglu")
def _up_swiglu(
    x: Tensor, w13: Tensor, row_token: Tensor, offs: Tensor, slot: Tensor, keeps: bool
) -> tuple[Tensor, Tensor]:
    h, gate_up = reference.gathered_swiglu(x, w13, row_token, offs)
    return h, gate_up if keeps else x.new_empty(0)


@_up_swiglu.register_fake
def _(
    x: Tensor, w13: Tensor, row_token: Tensor, offs: Tensor, slot: Tensor, keeps: bool
) -> tuple[Tensor, Tensor]:
    M, width = row_token.shape[0], w13.shape[1]
    return x.new_empty(M, width // 2), x.new_empty((M, width) if keeps else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w13, _, offs, slot, keeps = inputs
    # Gate and up leave the operation for its backward pass alone and have no gradient.
    ctx.set_materialize_grads(False)
    if keeps:
        ctx.save_for_backward(x, w13, offs, slot, output[1])


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_x = grad_w13 = None
    if grad is not None:
        x, w13, offs, slot, gate_up = ctx.saved_tensors
        wide_grad = _swiglu_backward(grad, gate_up)
        if ctx.needs_input_grad[0]:
            grad_x = unpermute(grouped_mm(wide_grad, w13, offs, trans_w=False), slot)
        if ctx.needs_input_grad[1]:
            grad_w13 = grouped_dw(wide_grad, permute(x, slot), offs, out_dtype=w13.dtype)
    return grad_x, grad_w13, None, None, None, None


_up_swiglu.register_autograd(_differentiate, setup_context=_keep)


@operator(
    "moe_swiglu_backward",
    cuda="moe.triton:swiglu_backward",
    fake=lambda grad, gate_up: gate_up.new_empty(gate_up.shape),
)
def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    return reference.swiglu_backward(grad, gate_up)


@operator(
    "scale_by_router_weight",
    cuda="moe.triton:scale_by_router_weight",
    fake=lambda grad, h, slot, weight: tuple(t.new_empty(t.shape) for t in (grad, h, weight)),
)
def _scale_by_router_weight(
    grad: Tensor, h: Tensor, slot: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.scale_by_router_weight(grad, h, slot, weight)
