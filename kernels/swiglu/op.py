"""SwiGLU as an operator: the reference on CPUs, Triton on GPUs, known to autograd and compile."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..operators import operator, save_inputs
from . import reference


@operator(
    "swiglu",
    cuda="swiglu.triton:forward",
    fake=lambda gate, up, row_weight=None: gate.new_empty(gate.shape),
)
def swiglu(gate: Tensor, up: Tensor, row_weight: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, times each row's weight; see the reference."""
    return reference.swiglu(gate, up, row_weight).contiguous()


@operator("swiglu_backward", cuda="swiglu.triton:backward")
def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_gate, grad_up, grad_weight = reference.backward(grad, gate, up, row_weight)
    if grad_weight is None:
        grad_weight = gate.new_empty(0)
    return grad_gate.contiguous(), grad_up.contiguous(), grad_weight.contiguous()


@_backward.register_fake
def _(
    grad: Tensor, gate: Tensor, up: Tensor, row_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    weight = gate.new_empty(0) if row_weight is None else row_weight.new_empty(row_weight.shape)
    return gate.new_empty(gate.shape), up.new_empty(up.shape), weight


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, row_weight = ctx.saved_tensors
    grad_gate, grad_up, grad_weight = _backward(grad, gate, up, row_weight)
    return grad_gate, grad_up, None if row_weight is None else grad_weight


swiglu.register_autograd(_differentiate, setup_context=save_inputs)
