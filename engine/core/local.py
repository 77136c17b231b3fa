"""The part of a tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_split(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")  # asked in this way, no import of DTensor is paid


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard without gradients; it shares the tensor's memory."""
    return cast("DTensor", tensor).to_local() if is_split(tensor) else tensor.detach()


def num_parts(tensor: Tensor) -> int:
    """Return the number of different shards of a tensor; replicas count once."""
    if not is_split(tensor):
        return 1
    placed = cast("DTensor", tensor)
    sizes = zip(placed.device_mesh.shape, placed.placements, strict=True)
    # Mesh axes along which a tensor is replicated hold the same shard again.
    return prod(size for size, placement in sizes if not placement.is_replicate())


def norm_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return fp32, in which norms are summed, or fp64 if tensors have it: torch narrows none."""
    return torch.float64 if any(x.dtype is torch.float64 for x in tensors) else torch.float32
