"""Which part of a parameter a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Sizes = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dim, and how long it is."""

    start: Sizes
    sizes: Sizes

    def is_rows(self, shape: Sequence[int]) -> bool:
        """Return whether it is a run of whole rows of a tensor of this shape."""
        return self.sizes[1:] == tuple(shape)[1:]

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return where it begins in each row of such a tensor, and ends, in elements."""
        first = last = 0
        for start, size, length in zip(self.start[1:], self.sizes[1:], shape[1:], strict=True):
            first, last = first * length + start, last * length + start + size - 1
        return first, last + 1

    def columns(self, rows: Tensor) -> Tensor:
        """Return what lies in the box of some whole rows."""
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            if dim:
                rows = rows.narrow(dim, start, size)
        return rows

    def chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of first and last rows, the last one left out, of at most so many."""
        first, end = self.start[0], self.start[0] + self.sizes[0]
        for start in range(first, end, rows):
            yield start, min(start + rows, end)


def held_box(parameter: DTensor) -> Box | None:
    """Return what this rank holds of a parameter, or None if that is no box."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if not parameter.ndim:
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    for dim, size in enumerate(parameter.shape):
        cuts = [
            (mesh.size(axis), type(each))
            for axis, each in enumerate(placements)
            if isinstance(each, (Shard, _StridedShard)) and each.dim == dim
        ]
        if any(kind is _StridedShard for _, kind in cuts) and size % prod(n for n, _ in cuts):
            return None  # what a rank holds may lie apart
    sizes, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Box(tuple(start), tuple(sizes))


def holds_rows(parameter: DTensor) -> bool:
    """Return whether each rank holds a run of whole rows of a parameter; all agree on it."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    others = (
        parameter.device_mesh.size(axis)
        for axis, each in enumerate(parameter.placements)
        if isinstance(each, (Shard, _StridedShard)) and each.dim
    )
    return max(others, default=1) == 1 and held_box(parameter) is not None
