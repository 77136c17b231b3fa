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
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, row_weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, row_weight)
        return _weighted(F.silu(gate) * up, row_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, row_weight = ctx.saved_tensors
        silu, grad_weight = F.silu(gate), None
        if row_weight is not None:
            wide = torch.promote_types(gate.dtype, torch.float32)
            grad_weight = (silu * up).mul_(grad).sum(-1, dtype=wide).to(row_weight.dtype)
            grad = _weighted(grad, row_weight)
        return _silu_backward(grad * up, gate), grad * silu, grad_weight


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        found: Tensor = torch.ops.aten.silu_backward(grad, x)
        return found
    sigmoid = x.sigmoid()  # torch's own has no derivative
    return grad * sigmoid * (1 + x * (1 - sigmoid))


def _weighted(x: Tensor, row_weight: Tensor | None) -> Tensor:
    return x if row_weight is None else (x * row_weight.unsqueeze(-1)).to(x.dtype)


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
