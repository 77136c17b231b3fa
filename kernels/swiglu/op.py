"""SwiGLU as an operator: the reference on CPUs, Triton on GPUs, known to autograd and compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference


def swiglu(gate: Tensor, up: Tensor, row_weight: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, times each row's weight; see the reference."""
    out: Tensor = _forward(gate, up, row_weight)
    return out


@torch.library.custom_op("trainer::swiglu", mutates_args=(), device_types="cpu")
def _forward(gate: Tensor, up: Tensor, row_weight: Tensor | None) -> Tensor:
    return reference.swiglu(gate, up, row_weight).contiguous()


@_forward.register_kernel("cuda")
def _(gate: Tensor, up: Tensor, row_weight: Tensor | None) -> Tensor:
    from . import triton

    return triton.forward(gate, up, row_weight)


@_forward.register_fake
def _(gate: Tensor, up: Tensor, row_weight: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("trainer::swiglu_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_gate, grad_up, grad_weight = reference.backward(grad, gate, up, row_weight)
    if grad_weight is None:
        grad_weight = gate.new_empty(0)
    return grad_gate.contiguous(), grad_up.contiguous(), grad_weight.contiguous()


@_backward.register_kernel("cuda")
def _(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from . import triton

    return triton.backward(grad, gate, up, row_weight)


@_backward.register_fake
def _(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    weight = gate.new_empty(0) if row_weight is None else row_weight.new_empty(row_weight.shape)
    return gate.new_empty(gate.shape), up.new_empty(up.shape), weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, row_weight = ctx.saved_tensors
    grad_gate, grad_up, grad_weight = _backward(grad, gate, up, row_weight)
    return grad_gate, grad_up, None if row_weight is None else grad_weight


_forward.register_autograd(_differentiate, setup_context=_keep)
