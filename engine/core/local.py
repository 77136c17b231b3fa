"""The part of a tensor that this rank holds."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_split(tensor: Tensor) -> bool:
    """Return whether a tensor is laid out over ranks."""
    return hasattr(tensor, "to_local")  # asked in this way, no import of DTensor is paid


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, in the same memory; without gradients."""
    return cast("DTensor", tensor).to_local() if is_split(tensor) else tensor.detach()


def num_parts(tensor: Tensor) -> int:
    """Return into how many different parts ranks have split a tensor."""
    if not is_split(tensor):
        return 1
    placed = cast("DTensor", tensor)
    sizes = zip(placed.device_mesh.shape, placed.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())
