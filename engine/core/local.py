"""The part of a tensor that this rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SCALE = "_scale"
"""end of the keys of an optimizer's state whose tensors have one element for each block of a row"""


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


def sum_over_shards(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each tensor, the sum of a value over the ranks that hold the different shards.

    All ranks that share a tensor must call this with the same tensors in the same order. Values of
    tensors with the same placement travel together.

    Args:
        tensors: DTensors, or tensors that are whole on this rank.
        values: this rank's value for each tensor, of any shape, all of one dtype.
    """
    by_group: dict[Any, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if is_split(tensor):
            placed = cast("DTensor", tensor)
            axes = [axis for axis, at in enumerate(placed.placements) if not at.is_replicate()]
            by_group[placed.device_mesh, tuple(axes)].append(index)
    sums = list(values)
    for (mesh, axes), indices in by_group.items():
        total = torch.cat([values[index].reshape(-1) for index in indices])
        for axis in axes:
            dist.all_reduce(total, group=mesh.get_group(axis))
        parts = torch.split(total, [values[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            sums[index] = part.view(values[index].shape)
    return sums


def distribute_like(weight: Tensor, shard: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a DTensor of a shape whose shards lie where those of a weight do.

    Args:
        weight: a DTensor.
        shard: this rank's part of the result.
        shape: the shape of the result; its last dim may be shorter than that of the weight.
    """
    placed = cast("DTensor", weight.detach())
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Shape and stride, because torch would infer them from a shard as if all shards were equal. The
    # check would cost a collective for each parameter.
    return type(placed).from_local(
        shard,
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides) if list(shape) != list(weight.shape) else weight.stride(),
    )
