"""Collectives on tensors, with and without gradients, and how inductor fuses them with matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from warnings import catch_warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.torch_private import all_to_all_single
from ...kernels.torch_private import functional_collectives as functional
from ..core.errors import EnvironmentFault

# torch 2.13 renamed them and warns of the old names.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)
_GATHERS_ARE_TRACED = hasattr(functional, "all_gather_single")
"""whether torch.compile can trace an all-gather along another dimension than 0"""


# A global, because inductor's own switch is one: it holds for all that is compiled later.
_fuses_with_matmuls = False
"""whether compiled graphs contain all-gathers in the form that inductor fuses with matmuls"""


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along `dim`; the backward pass is a reduce-scatter."""
    return cast("Tensor", _AllGather.apply(x, dim, group))  # type: ignore[no-untyped-call]


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and return this rank's shard along `dim`; the backward is an all-gather."""
    return cast("Tensor", _ReduceScatter.apply(x, dim, group))  # type: ignore[no-untyped-call]


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks; the backward pass sums gradients over ranks."""
    return cast("Tensor", _AllReduce.apply(x, group))  # type: ignore[no-untyped-call]


def all_gather_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks along `dim`, without a gradient."""
    if (_fuses_with_matmuls or not _GATHERS_ARE_TRACED) and torch.compiler.is_compiling():
        # The form that inductor's pass looks for. Torch's own all-gather along another dimension
        # than 0 is a view instead where the leading dimensions are 1 (torch 2.13), and the pass
        # does not recognise a view.
        pieces = _all_gather(x.contiguous(), 0, group)
        return torch.cat(pieces.chunk(group.size()), dim)
    return wait(_all_gather(x.contiguous(), dim, group))


def reduce_scatter_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over ranks and return this rank's shard along `dim`, without a gradient."""
    return wait(_reduce_scatter(x.contiguous(), "sum", dim, group))


def all_reduce_no_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, without a gradient."""
    return wait(functional.all_reduce(x, "sum", group))


def wait(x: Tensor) -> Tensor:
    """Wait for the collective whose pending result is `x`, and return `x`."""
    # A compiled graph waits by itself, and fuses collectives only where nothing else does.
    if torch.compiler.is_compiling():
        return x
    return cast("Tensor", functional.wait_tensor(x))


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


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_no_grad(grad, ctx.group), None


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
    from ...kernels.torch_private import enable_symm_mem_for_group, inductor_config

    with catch_warnings(action="ignore", category=FutureWarning):
        # Symmetric memory no longer needs it; the pass still asks whether it was called.
        enable_symm_mem_for_group(group.group_name)
    inductor_config._micro_pipeline_tp = True
    _fuses_with_matmuls = True


class Splits(NamedTuple):
    """The numbers of rows that a rank sends to and receives from each rank of a group."""

    sent: list[int]
    received: list[int]

    def reversed(self) -> Splits:
        """Return the splits of the opposite direction."""
        return Splits(self.received, self.sent)


@dataclass
class RowExchange:
    """An all-to-all of rows, and its backward pass."""

    splits: Splits
    group: ProcessGroup
    gradient: Tensor | None = None
    """the pending all-to-all of the gradient, from `wait_for_rows` to `send_rows`"""


def all_gather_rows(x: Tensor, lengths: list[int], group: ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks of a group; the backward pass sums gradients over ranks.

    Args:
        x: this rank's rows, [N, ...].
        lengths: the number of rows of each rank, which may differ.
        group: the process group.
    """
    ranks = group.size()
    if ranks == 1:
        return x
    # Each rank sends all its rows to every rank: gloo has no all-gather of unequal lengths, but an
    # all-to-all of them, zero included.
    exchange = RowExchange(Splits([len(x)] * ranks, lengths), group)
    return wait_for_rows(send_rows(x.expand(ranks, *x.shape).flatten(0, 1), exchange), exchange)


def reduce_scatter_rows(x: Tensor, lengths: list[int], group: ProcessGroup) -> Tensor:
    """Sum the outputs of all ranks of a group and return this rank's rows of the sum.

    Args:
        x: this rank's outputs for the rows of all ranks, [sum(lengths), ...].
        lengths: the number of rows of each rank.
        group: the process group.
    """
    ranks, mine = group.size(), lengths[dist.get_rank(group)]
    if ranks == 1:
        return x
    # torch's reduce-scatter takes equal lengths only: exchange all rows, and sum what arrives.
    exchange = RowExchange(Splits(lengths, [mine] * ranks), group)
    return wait_for_rows(send_rows(x, exchange), exchange).view(ranks, mine, *x.shape[1:]).sum(0)


def send_rows(x: Tensor, exchange: RowExchange) -> Tensor:
    """Start an all-to-all and return its pending result, which only `wait_for_rows` may read.

    Args:
        x: rows sorted by the rank that they go to, [N, ...].
        exchange: the splits and the group; one object per call.
    """
    return cast("Tensor", _SendRows.apply(x, exchange))  # type: ignore[no-untyped-call]


def wait_for_rows(x: Tensor, exchange: RowExchange) -> Tensor:
    """Wait for the all-to-all that `send_rows` started with the same `exchange`."""
    return cast("Tensor", _WaitForRows.apply(x, exchange))  # type: ignore[no-untyped-call]


def start_all_to_all(x: Tensor, splits: Splits, group: ProcessGroup) -> Tensor:
    """Start an all-to-all of rows and return its pending result, without a gradient."""
    # The operator itself: in eager mode the function of the same name returns a tensor subclass
    # that waits by itself when it is first used.
    rows = x.contiguous()
    return cast("Tensor", all_to_all_single(rows, splits.received, splits.sent, group.group_name))


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return start_all_to_all(x, exchange.splits, exchange.group)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        # The gradient that autograd passes is the one before the exchange, returned by
        # `_WaitForRows.backward` only so that autograd runs this function after it.
        exchange = ctx.exchange
        # `exchange` outlives this pass in the arguments of others: give the memory back.
        gradient, exchange.gradient = exchange.gradient, None
        return wait(gradient), None


class _WaitForRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return wait(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Started here and waited for in `_SendRows.backward`, so that it overlaps with what the
        # backward pass computes between them.
        exchange = ctx.exchange
        exchange.gradient = start_all_to_all(grad, exchange.splits.reversed(), exchange.group)
        return grad, None
