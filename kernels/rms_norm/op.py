"""RMSNorm as an operator: the reference on CPUs, Triton on GPUs, known to autograd and compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import operator
from . import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm; see the reference."""
    return _forward(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum, in one pass; see the reference."""
    out, total, _ = _forward(x, residual, weight, eps)
    return out, total


@operator("rms_norm", cuda="rms_norm.triton:forward")
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    out = reference.rms_norm(total, weight, eps).contiguous()
    # An operation of torch must not return its input: without a residual, the caller has the sum.
    kept = x.new_empty(0) if residual is None else total.contiguous()
    return out, kept, reference.inverse_rms(total, eps).contiguous()


@_forward.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    inverse = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape), inverse


@operator(
    "rms_norm_backward",
    cuda="rms_norm.triton:backward",
    fake=lambda grad, grad_total, x, weight, inverse: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
    ),
)
def _backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = reference.backward(grad, x, weight, inverse)
    return (grad_x if grad_total is None else grad_x + grad_total).contiguous(), grad_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _ = inputs
    _, total, inverse = output
    # The inverse never has a gradient; zeros in its place would be a tensor for nothing.
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None
    ctx.save_for_backward(total if ctx.has_residual else x, weight, inverse)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_total: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, inverse = ctx.saved_tensors
    if not ctx.has_residual:
        grad_total = None
    if grad is None:
        grad = torch.zeros_like(x)
    grad_x, grad_weight = _backward(grad, grad_total, x, weight, inverse)
    return grad_x, grad_x if ctx.has_residual else None, grad_weight, None


_forward.register_autograd(_differentiate, setup_context=_keep)
