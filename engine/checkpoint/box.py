"""Boxes: parts of a tensor, such as the shard that a rank holds or a file stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor

from ..core.local import is_split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

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

    def overlap(self, other: Box) -> Box | None:
        """Return the box that two boxes of a tensor have in common, or None."""
        start = tuple(map(max, self.start, other.start))
        ends = zip(*self, *other, start, strict=True)
        sizes = tuple(min(a + m, b + n) - first for a, m, b, n, first in ends)
        return Box(start, sizes) if all(size > 0 for size in sizes) else None

    def shift(self, origin: Sizes) -> Box:
        """Return the same box within a part of the tensor that begins at `origin`."""
        return Box(tuple(map(int.__sub__, self.start, origin)), self.sizes)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor that lie in the box, in the same memory."""
        return self.columns(
            tensor.narrow(0, self.start[0], self.sizes[0]) if self.start else tensor
        )

    def chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of first and last rows, the last one left out, of at most so many."""
        first, end = self.start[0], self.start[0] + self.sizes[0]
        for start in range(first, end, rows):
            yield start, min(start + rows, end)


def covers(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes cover a tensor of this shape, each element once."""
    for start, sizes in boxes:
        if len(start) != len(shape) or len(sizes) != len(shape):
            return False
        ends = zip(start, sizes, shape, strict=True)
        if any(begin < 0 or size < 0 or begin + size > full for begin, size, full in ends):
            return False
    full = [box for box in boxes if prod(box.sizes)]
    if sum(prod(box.sizes) for box in full) != prod(shape):
        return False
    near: list[Box] = []  # only these can overlap: thousands of ranks divide a tensor into rows
    for box in sorted(full):
        near = [other for other in near if not shape or sum(part[0] for part in other) > box[0][0]]
        if any(box.overlap(other) for other in near):
            return False
        near.append(box)
    return True


def local_box(tensor: Tensor) -> Box | None:
    """Return the part of a tensor that this rank holds, or None if other ranks hold all of it."""
    if not is_split(tensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    # Importing it takes half as long as torch itself; only sharded runs pay.
    from ...kernels.torch_private import compute_local_shape_and_global_offset

    mesh, placements = cast("DTensor", tensor).device_mesh, cast("DTensor", tensor).placements
    if mesh.get_coordinate() is None:  # a rank of another pipeline stage
        return None
    sizes, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Box(tuple(start), tuple(sizes))


def contiguous_box(parameter: DTensor) -> Box | None:
    """Return the part of a parameter that this rank holds, or None if it is not one box."""
    mesh, placements = parameter.device_mesh, parameter.placements
    for dim, size in enumerate(parameter.shape):
        axes = [axis for axis, placement in enumerate(placements) if _dim(placement) == dim]
        # torch's _StridedShard, which FSDP makes of a dimension that tensor parallelism splits too
        is_strided = any(hasattr(placements[axis], "split_factor") for axis in axes)
        if is_strided and size % prod(mesh.size(axis) for axis in axes):
            return None  # what a rank holds may lie apart
    return local_box(parameter) if parameter.ndim else None


def holds_rows(parameter: DTensor) -> bool:
    """Return whether each rank holds a run of whole rows of a parameter; all agree on it."""
    others = (
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if _dim(placement)
    )
    return max(others, default=1) == 1 and contiguous_box(parameter) is not None


def _dim(placement: Placement) -> int | None:
    """Return the dimension that a placement splits, or None if it splits none."""
    return getattr(placement, "dim", None)
