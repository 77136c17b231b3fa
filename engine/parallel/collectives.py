"""Collectives on tensors, with and without gradients, and how inductor fuses them with matmuls."""

from __future__ import annotations

from typing import Any, cast
from warnings import catch_warnings

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ProcessGroup

from ..core.errors import EnvironmentFault

# torch 2.13 renamed them and warns of the old names.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)


_fuses_with_matmuls = False
"""whether compiled graphs contain all-gathers in the form that inductor fuses with matmuls"""


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along `dim`; the backward pass is a reduce-scatter."""
    return cast("Tensor", _AllGather.apply(x, dim, group))  # type: ignore[no-untyped-call]


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and return this rank's shard along `dim`; the backward is an all-gather."""
    return cast("Tensor", _ReduceScatter.apply(x, dim, group))  # type: ignore[no-untyped-call]


def all_gather_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along `dim`, without a gradient."""
    if _fuses_with_matmuls and torch.compiler.is_compiling():
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
    return cast("Tensor", functional.wait_tensor(x))  # type: ignore[no-untyped-call]


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


SYMMETRIC_MEMORY_DEVICES = ("cuda",)


def fuse_with_matmuls(group: ProcessGroup, device: torch.device) -> None:
    """Let inductor fuse matmuls with a group's collectives in the blocks that are compiled later.

    Inductor's micro-pipeline pass replaces an all-gather before matmuls, and a reduce-scatter after
    one, by operations on symmetric memory, which pass pieces between GPUs as they are needed (Wang
    et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
    Learning Models", ASPLOS).

    Raises:
        EnvironmentFault: the device has no symmetric memory.
    """
    global _fuses_with_matmuls
    if device.type not in SYMMETRIC_MEMORY_DEVICES:
        raise EnvironmentFault(
            f"parallel.async_tensor needs GPUs, and this rank computes on {device.type}",
            "set parallel.async_tensor = false",
        )
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with catch_warnings(action="ignore", category=FutureWarning):
        # Symmetric memory no longer needs it; the pass still asks whether it was called.
        enable_symm_mem_for_group(group.group_name)
    config._micro_pipeline_tp = True
    _fuses_with_matmuls = True
