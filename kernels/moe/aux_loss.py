"""An operation whose backward pass adds an auxiliary loss and counts the load of experts.

Both happen in the backward pass because that runs once for each micro batch: a forward pass may run
twice (recomputation) or without a backward pass (evaluation).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operators import operator


@operator("add_aux_loss", fake=lambda x, *_: torch.empty_like(x))
def add_aux_loss(x: Tensor, loss: Tensor, factor: Tensor, counter: Tensor, load: Tensor) -> Tensor:
    """Return x; the backward pass adds the gradient of `factor * loss`, and `load` to `counter`.

    Args:
        x: of any shape; without a gradient nothing is added.
        loss: scalar.
        factor: scalar.
        counter: written to in place, unseen by autograd and compilers: several micro batches of a
            pipeline are under way at a time, and each would find a tensor that it saved modified.
        load: of the shape of `counter`.
    """
    return x.clone()  # an operation of torch must not return its input


@operator("add_to_counter", fake=lambda grad, *_: torch.empty_like(grad))
def _add_to_counter(grad: Tensor, counter: Tensor, load: Tensor) -> Tensor:
    # The gradient passes through: compilers drop an operation whose result is unused, and do not
    # know that this one writes.
    counter.data.add_(load)
    return grad.clone()


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, loss, factor, ctx.counter, load = inputs
    ctx.dtype = loss.dtype
    ctx.save_for_backward(factor, load)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    factor, load = ctx.saved_tensors
    return _add_to_counter(grad, ctx.counter, load), factor.to(ctx.dtype), None, None, None


add_aux_loss.register_autograd(_backward, setup_context=_save)
