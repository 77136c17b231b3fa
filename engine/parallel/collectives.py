"""Collectives along a dim of a tensor that gradients pass through."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed them and warns of the old names.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)


fusing = False
"""whether compiled graphs hold each gather in the one form that inductor fuses with products"""


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the pieces of all ranks, joined along `dim`; gradients are summed over the ranks."""
    return cast(Tensor, _Gather.apply(x, dim, group))  # type: ignore[no-untyped-call]


def scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's piece along `dim` of the sum over ranks; gradients are gathered."""
    return cast(Tensor, _Scatter.apply(x, dim, group))  # type: ignore[no-untyped-call]


def gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the pieces of all ranks, joined along `dim`, without a gradient."""
    if fusing and torch.compiler.is_compiling():
        pieces = _all_gather(x.contiguous(), 0, group)
        return torch.cat(pieces.chunk(group.size()), dim)  # torch has views for single rows
    return _waited(_all_gather(x.contiguous(), dim, group))


def scattered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's piece along `dim` of the sum over ranks, without a gradient."""
    return _waited(_reduce_scatter(x.contiguous(), "sum", dim, group))


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, without a gradient."""
    return _waited(functional.all_reduce(x, "sum", group))


def _waited(x: Tensor) -> Tensor:
    # A compiled graph waits by itself, and fuses collectives only where nothing else does.
    if torch.compiler.is_compiling():
        return x
    return cast(Tensor, functional.wait_tensor(x))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scattered(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.dim, ctx.group), None, None
