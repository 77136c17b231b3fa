"""An operation whose backward pass counts, and differentiates a loss that joins in there.

A forward pass may run twice (recomputation) or without a backward pass (evaluation); a backward
pass runs once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("trainer::tallied", mutates_args=())
def tallied(x: Tensor, loss: Tensor, factor: Tensor, tally: Tensor, seen: Tensor) -> Tensor:
    """Return x. The backward pass adds `seen` to `tally`, and differentiates `factor * loss` too.

    Args:
        x: of any shape; it needs a gradient, or nothing happens.
        loss: scalar.
        factor: scalar.
        tally: changed in place, unknown to autograd and compilers: micro batches of a pipeline are
            under way together, and each would find what it has saved modified by another.
        seen: of the shape of tally.
    """
    return x.clone()


@tallied.register_fake
def _(x: Tensor, loss: Tensor, factor: Tensor, tally: Tensor, seen: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("trainer::add_to_tally", mutates_args=())
def _add(grad: Tensor, tally: Tensor, seen: Tensor) -> Tensor:
    tally.data.add_(seen)
    return grad.clone()


@_add.register_fake
def _(grad: Tensor, tally: Tensor, seen: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, loss, factor, ctx.tally, seen = inputs
    ctx.dtype = loss.dtype
    ctx.save_for_backward(factor, seen)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    factor, seen = ctx.saved_tensors
    return _add(grad, ctx.tally, seen), factor.to(ctx.dtype), None, None, None


tallied.register_autograd(_backward, setup_context=_keep)
