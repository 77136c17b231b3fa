"""Collectives along one dimension of a tensor, with and without gradients."""

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
"""whether compiled graphs contain all-gathers in the form that inductor fuses with matmuls"""


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along `dim`; the backward pass is a reduce-scatter."""
    return cast(Tensor, _AllGather.apply(x, dim, group))  # type: ignore[no-untyped-call]


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and return this rank's shard along `dim`; the backward is an all-gather."""
    return cast(Tensor, _ReduceScatter.apply(x, dim, group))  # type: ignore[no-untyped-call]


def all_gather_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along `dim`, without a gradient."""
    if fusing and torch.compiler.is_compiling():
        pieces = _all_gather(x.contiguous(), 0, group)
        return torch.cat(pieces.chunk(group.size()), dim)  # torch has views for single rows
    return _wait(_all_gather(x.contiguous(), dim, group))


def reduce_scatter_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and return this rank's shard along `dim`, without a gradient."""
    return _wait(_reduce_scatter(x.contiguous(), "sum", dim, group))


def all_reduce_no_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, without a gradient."""
    return _wait(functional.all_reduce(x, "sum", group))


def _wait(x: Tensor) -> Tensor:
    # A compiled graph waits by itself, and fuses collectives only where nothing else does.
    if torch.compiler.is_compiling():
        return x
    return cast(Tensor, functional.wait_tensor(x))  # type: ignore[no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_no_grad(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_no_grad(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_no_grad(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_no_grad(grad, ctx.dim, ctx.group), None, None
