"""Rotation as an operator: the reference on CPUs, Triton on GPUs, known to autograd and compile."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..operators import operator
from . import reference


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of each head by the angles of their position; see the reference.

    The angles have no gradient.
    """
    return _rotary(x, cos, sin, False)


@operator(
    "rotary", cuda="rotary.triton:rotary", fake=lambda x, cos, sin, inverse: x.new_empty(x.shape)
)
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return reference.rotary(x, cos, -sin if inverse else sin).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # A rotation's transpose is the rotation by the negative angles.
    cos, sin = ctx.saved_tensors
    return _rotary(grad, cos, sin, not ctx.inverse), None, None, None


_rotary.register_autograd(_differentiate, setup_context=_save)
