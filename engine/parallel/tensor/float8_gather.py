"""An all-gather of activations in float8: half the bytes of bf16, for rows that multiply in it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..collectives import all_gather_no_grad, reduce_scatter_no_grad

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
SMALLEST = 1e-12
"""of the largest values of rows; torchao's, whose scales these are"""
SCALE_BYTES = 4


def all_gather_float8(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Round rows to float8 and concatenate those of all ranks along `dim`, in the dtype of `x`.

    A projection that rounds its rows to float8 with scales that are powers of two finds them on the
    grid: its outputs are those without this. Gradients are reduce-scattered in their own dtype.

    Args:
        x: rows along the last dimension, which no rank splits.
        dim: the dimension along which the ranks' shards are concatenated; not the last.
        group: the process group.
    """
    return cast("Tensor", _AllGatherFloat8.apply(x, dim, group))  # type: ignore[no-untyped-call]


class _AllGatherFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return unpack_rows(all_gather_no_grad(pack_rows(x), dim, group), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_no_grad(grad, ctx.dim, ctx.group), None, None


def pack_rows(x: Tensor) -> Tensor:
    """Return each row in float8, and the row's scale behind it, as bytes: [..., D + 4]."""
    wide = x.float()
    # In fp64, as torchao does: a compiled division in fp32 could round to another power of two.
    largest = wide.abs().amax(-1, keepdim=True).double().clamp(min=SMALLEST)
    scale = (LARGEST / largest).float().log2().floor().exp2()
    values = (wide * scale).clamp(-LARGEST, LARGEST).to(FORMAT)
    # One message: a second collective for the scales would cost as much time as this one.
    return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], -1)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows that `pack_rows` packed; their values are exact in bf16 and fp32."""
    values, scale = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:]
    inverse = scale.contiguous().view(torch.float32).reciprocal()
    return values.contiguous().view(FORMAT).to(dtype) * inverse.to(dtype)
