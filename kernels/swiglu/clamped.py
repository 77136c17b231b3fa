"""SwiGLU with limits (gpt-oss; OpenAI 2025, arXiv:2508.10925, section 2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clamped_swiglu(
    gate: Tensor, up: Tensor, limit: float, alpha: float, row_weight: Tensor | None = None
) -> Tensor:
    """Return g * sigmoid(alpha * g) * (u + 1) of gate and up, cut off.

    The backward pass computes it again instead of keeping it.

    Args:
        gate: [..., F], cut off above `limit`.
        up: [..., F], cut off above `limit` and below -`limit`.
        limit: of both.
        alpha: how steep the sigmoid is.
        row_weight: [...], a factor of each row, such as the weight of its expert.
    """
    out: Tensor = _ClampedSwiGLU.apply(gate, up, row_weight, limit, alpha)  # type: ignore[no-untyped-call]
    return out


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, row_weight: Tensor | None, limit: float, alpha: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up, row_weight)
        ctx.limit, ctx.alpha = limit, alpha
        g, u = _cut_off(gate, up, limit)
        out = g * torch.sigmoid(alpha * g) * (u + 1)
        if row_weight is not None:
            out = out * row_weight.to(out.dtype).unsqueeze(-1)
        return out.to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, row_weight = ctx.saved_tensors
        g, u = _cut_off(gate, up, ctx.limit)
        sigmoid, grad, grad_weight = torch.sigmoid(ctx.alpha * g), grad.to(g.dtype), None
        silu = g * sigmoid
        if row_weight is not None:
            grad_weight = (grad * silu * (u + 1)).sum(-1).to(row_weight.dtype)
            grad = grad * row_weight.to(g.dtype).unsqueeze(-1)
        slope = sigmoid + ctx.alpha * silu * (1 - sigmoid)
        grad_gate = grad * (u + 1) * slope * (gate <= ctx.limit)
        grad_up = grad * silu * (up.abs() <= ctx.limit)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), grad_weight, None, None


def _cut_off(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return gate.to(wide).clamp(max=limit), up.to(wide).clamp(-limit, limit)
