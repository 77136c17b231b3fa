"""The permutations as torch operations: the reference on CPUs, Triton on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference


def permute(x: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return each token's row in the places of its choices; see `reference.permute`."""
    out: Tensor = _permute(x, slot, weight)
    return out


@torch.library.custom_op("trainer::permute", mutates_args=(), device_types="cpu")
def _permute(x: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    return reference.permute(x, slot, weight)


def unpermute(y: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum of rows; see `reference.unpermute`."""
    out: Tensor = _unpermute(y, slot, weight)
    return out


@torch.library.custom_op("trainer::unpermute", mutates_args=(), device_types="cpu")
def _unpermute(y: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    return reference.unpermute(y, slot, weight)


@torch.library.custom_op("trainer::row_dots", mutates_args=(), device_types="cpu")
def row_dots(x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
    """Return the products of rows with their token's; see `reference.row_dots`."""
    return reference.row_dots(x, y, slot)


@_permute.register_kernel("cuda")
def _(x: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    from . import triton

    return triton.permute(x, slot, weight)


@_unpermute.register_kernel("cuda")
def _(y: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    from . import triton

    return triton.unpermute(y, slot, weight)


@row_dots.register_kernel("cuda")
def _(x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
    from . import triton

    return triton.row_dots(x, y, slot)


@_permute.register_fake
def _(x: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_empty(slot.shape[0] * slot.shape[1], x.shape[1])


@_unpermute.register_fake
def _(y: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    return y.new_empty(slot.shape[0], y.shape[1])


@row_dots.register_fake
def _(x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
    return x.new_empty(slot.shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, slot, weight = ctx.saved_tensors
    grad_x = unpermute(grad, slot, weight) if ctx.needs_input_grad[0] else None
    grad_weight = row_dots(x, grad, slot).to(weight.dtype) if ctx.needs_input_grad[2] else None
    return grad_x, None, grad_weight


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, slot, weight = ctx.saved_tensors
    grad_y = permute(grad, slot, weight) if ctx.needs_input_grad[0] else None
    grad_weight = row_dots(grad, y, slot).to(weight.dtype) if ctx.needs_input_grad[2] else None
    return grad_y, None, grad_weight


def _row_dots_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, slot = ctx.saved_tensors
    grad_x = unpermute(y, slot, grad).to(x.dtype) if ctx.needs_input_grad[0] else None
    grad_y = permute(x, slot, grad).to(y.dtype) if ctx.needs_input_grad[1] else None
    return grad_x, grad_y, None


_permute.register_autograd(_permute_backward, setup_context=_keep)
_unpermute.register_autograd(_unpermute_backward, setup_context=_keep)
row_dots.register_autograd(_row_dots_backward, setup_context=_keep)
