"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + K / 2) of each head by their position's angles, in fp32 at least.

    The pairing is Hugging Face's (halves), not the paper's (neighbours): the two differ by a fixed
    permutation of the rows of the query and key weights.

    Args:
        x: [B, S, H, K].
        cos: [S, 1, K / 2] or [B, S, 1, K / 2], fp32.
        sin: like cos.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        out: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return out
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class _Rotary(torch.autograd.Function):
    """`rotary` in fewer passes over memory; gradients are rotated by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        turned = wide * torch.cat((cos, cos), dim=-1)
        (first, second), (x_first, x_second) = turned.chunk(2, -1), wide.chunk(2, -1)
        # Not `addcmul_`, which rounds once where the formula, compiled too, rounds twice.
        first.sub_(x_second * sin)
        second.add_(x_first * sin)
        return turned.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotary(grad, cos, -sin), None, None
