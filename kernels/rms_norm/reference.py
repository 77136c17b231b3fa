"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 at least.

    Args:
        x: [..., D].
        weight: [D]; cast to the dtype of x first, as sharded mixed precision does.
        eps: added to the mean square.
    """
    weight = weight.to(x.dtype)
    # torch's norm (2.13) keeps x in fp32 on a CPU, and reads it a dozen times for the gradient.
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    else:
        out = F.rms_norm(x, weight.shape, weight, eps)
    return out


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` in fewer passes over memory; keeps x, and the inverse RMS of each row."""

    # Buffers are used again: on a CPU, fresh memory costs as much as a pass over it.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square()
        inverse = squares.mean(-1, keepdim=True).add_(eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        # The memory of the squares is free again.
        out: Tensor = torch.mul(wide, inverse, out=squares).mul_(weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        # A second derivative is wanted, which the in-place way below does not have.
        if torch.is_grad_enabled():
            return *backward(grad, x, weight, inverse_rms(x, ctx.eps)), None
        width = x.shape[-1]
        wide_x, wide_grad = (t.reshape(-1, width).to(inverse.dtype) for t in (x, grad))
        inverse = inverse.view(-1, 1)
        weighted = wide_grad * weight
        products = weighted * wide_x
        along = products.sum(-1, keepdim=True).mul_(inverse.pow(3)).div_(width)
        grad_weight = torch.mul(wide_grad, wide_x, out=products).mul_(inverse).sum(0)
        grad_x = weighted.mul_(inverse).addcmul_(wide_x, along, value=-1)
        return grad_x.view(x.shape).to(x.dtype), grad_weight.to(weight.dtype), None


def zero_centered_rms_norm(
    kernel: Callable[[Tensor, Tensor, float], Tensor], x: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + weight), of which nothing is rounded before the end.

    Args:
        kernel: an implementation of `rms_norm`.
        x: see there.
        weight: [D], zeros for a scale of 1.
        eps: see there.
    """
    # In fp32 the kernel does not round 1 + weight, which would lose most of a small weight.
    wide = torch.promote_types(x.dtype, torch.float32)
    return kernel(x.to(wide), 1 + weight.to(wide), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and that sum, rounded to the dtype of x before the norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last dim, in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide.square().mean(-1) + eps).rsqrt()


def backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, each in its own dtype.

    Args:
        grad: of the norm of x, [..., D].
        x: [..., D].
        weight: [D].
        inverse: [...], see `inverse_rms`.
    """
    normal, wide = x * inverse.unsqueeze(-1), grad.to(inverse.dtype)
    weighted = wide * weight.to(x.dtype)
    # The norm removes the direction of x: its gradient has no part along it.
    along = (weighted * normal).mean(-1, keepdim=True)
    grad_x = inverse.unsqueeze(-1) * (weighted - normal * along)
    return grad_x.to(x.dtype), (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
