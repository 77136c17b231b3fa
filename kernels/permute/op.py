"""The permutations as torch operations: the reference on CPUs, Triton on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import operator, save_inputs
from . import reference


@operator(
    "permute",
    cuda="permute.triton:permute",
    fake=lambda x, slot, weight=None: x.new_empty(slot.shape[0] * slot.shape[1], x.shape[1]),
)
def permute(x: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the row of each token at the slots of its choices; see `reference.permute`."""
    return reference.permute(x, slot, weight)


@operator(
    "unpermute",
    cuda="permute.triton:unpermute",
    fake=lambda y, slot, weight=None: y.new_empty(slot.shape[0], y.shape[1]),
)
def unpermute(y: Tensor, slot: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the weighted sum of each token's rows; see `reference.unpermute`."""
    return reference.unpermute(y, slot, weight)


@operator(
    "row_dots",
    cuda="permute.triton:row_dots",
    fake=lambda x, y, slot: x.new_empty(
        slot.shape, dtype=torch.promote_types(x.dtype, torch.float32)
    ),
)
def row_dots(x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
    """Return the dot product of each row with its token's; see `reference.row_dots`."""
    return reference.row_dots(x, y, slot)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    """Keep the rows, which are large, only where the gradient of their weights is wanted."""
    rows, slot, weight = inputs
    wants_rows = weight is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(rows if wants_rows else None, slot, weight)


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, slot, weight = ctx.saved_tensors
    grad_x = unpermute(grad, slot, weight) if ctx.needs_input_grad[0] else None
    grad_weight = None
    # torch counts no input that a call leaves out.
    if weight is not None and ctx.needs_input_grad[2]:
        grad_weight = row_dots(x, grad, slot).to(weight.dtype)
    return grad_x, None, grad_weight


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, slot, weight = ctx.saved_tensors
    grad_y = permute(grad, slot, weight) if ctx.needs_input_grad[0] else None
    grad_weight = None
    if weight is not None and ctx.needs_input_grad[2]:
        grad_weight = row_dots(grad, y, slot).to(weight.dtype)
    return grad_y, None, grad_weight


def _row_dots_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, slot = ctx.saved_tensors
    grad_x = unpermute(y, slot, grad).to(x.dtype) if ctx.needs_input_grad[0] else None
    grad_y = permute(x, slot, grad).to(y.dtype) if ctx.needs_input_grad[1] else None
    return grad_x, grad_y, None


permute.register_autograd(_permute_backward, setup_context=_save)
unpermute.register_autograd(_unpermute_backward, setup_context=_save)
row_dots.register_autograd(_row_dots_backward, setup_context=save_inputs)
