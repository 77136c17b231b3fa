"""Gated feed-forward activation (Shazeer 2020, arXiv:2002.05202, equation 6)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor, row_weight: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up; the backward pass computes silu(gate) again instead of keeping it.

    Args:
        gate: [..., F].
        up: [..., F].
        row_weight: [...], a factor of each row, such as the weight of its expert.
    """
    out: Tensor = _SwiGLU.apply(gate, up, row_weight)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    # In place: on a CPU, fresh memory costs as much as a pass over it.

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, row_weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, row_weight)
        if torch.compiler.is_compiling():
            # Compiled by torch 2.11, a function that returns what it changed in place, or a view
            # of it, has wrong gradients.
            out = F.silu(gate) * up
            return out if row_weight is None else out * _column(row_weight, out)
        out = F.silu(gate).mul_(up)
        return out if row_weight is None else out.mul_(_column(row_weight, out))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, row_weight = ctx.saved_tensors
        # A second derivative is wanted, which the in-place way below does not have.
        if torch.is_grad_enabled():
            return backward(grad, gate, up, row_weight)
        grad_up, grad_weight = F.silu(gate), None
        if row_weight is not None:
            weighed = (grad_up * up).mul_(grad)
            grad_weight = weighed.sum(-1).to(row_weight.dtype)
            # The memory of the first product is free again.
            grad = torch.mul(grad, _column(row_weight, grad), out=weighed)
        grad_up.mul_(grad)
        grad_gate = grad * up if row_weight is None else grad.mul_(up)
        return torch.ops.aten.silu_backward(grad_gate, gate), grad_up, grad_weight


def _column(row_weight: Tensor, like: Tensor) -> Tensor:
    return row_weight.unsqueeze(-1).to(like.dtype)


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate, up and row weight, computed in fp32 at least."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), grad.to(wide)
    sigmoid = g.sigmoid()
    silu = g * sigmoid
    grad_weight = None
    if row_weight is not None:
        grad_weight = (d * silu * u).sum(-1).to(row_weight.dtype)
        d = d * row_weight.to(wide).unsqueeze(-1)
    grad_gate = d * u * (sigmoid + silu * (1 - sigmoid))
    return grad_gate.to(gate.dtype), (d * silu).to(up.dtype), grad_weight


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up with the tanh form of GELU (arXiv:2002.05202, equation 6).

    The backward pass computes gelu(gate) again instead of keeping it.

    Args:
        gate: [..., F].
        up: [..., F].
    """
    out: Tensor = _GeGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate="tanh") * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return grad_gate, F.gelu(gate, approximate="tanh") * grad


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
        # Without a cast that changes nothing: see `_SwiGLU.forward`.
        return out if out.dtype == gate.dtype else out.to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, row_weight = ctx.saved_tensors
        g, u = _cut_off(gate, up, ctx.limit)
        sigmoid, grad, grad_weight = torch.sigmoid(ctx.alpha * g), grad.to(g.dtype), None
        # d(g * sigmoid(alpha * g)) / dg = sigmoid + alpha * silu * (1 - sigmoid).
        silu = g * sigmoid
        if row_weight is not None:
            grad_weight = (grad * silu * (u + 1)).sum(-1).to(row_weight.dtype)
            grad = grad * row_weight.to(g.dtype).unsqueeze(-1)
        slope = sigmoid + ctx.alpha * silu * (1 - sigmoid)
        # Beyond a limit the clamp is constant: no gradient.
        grad_gate = grad * (u + 1) * slope * (gate <= ctx.limit)
        grad_up = grad * silu * (up.abs() <= ctx.limit)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), grad_weight, None, None


def _cut_off(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return gate.to(wide).clamp(max=limit), up.to(wide).clamp(-limit, limit)
