"""Tensors that are read a few rows at a time, wherever they lie."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from .box import Box

BLOCK_BYTES = 2**23
"""What a thread holds of a tensor at a time, as long as a row is not longer."""


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""by their names in safetensors files; weights of others are not read"""

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape"""


class TensorRows(Protocol):
    """A tensor whose rows can be read; a scalar counts as one row."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, the last one left out, contiguous, on the CPU."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def row_count(shape: Sequence[int]) -> int:
    """Return how many rows a tensor has."""
    return shape[0] if shape else 1


def row_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a row."""
    return math.prod(shape[1:]) * dtype.itemsize


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor."""
    return math.prod(shape) * dtype.itemsize


def read_blocks(
    tensor: TensorRows, dtype: torch.dtype, first: int, last: int, name: str = ""
) -> Iterator[Tensor]:
    """Yield the rows from `first` to `last` as flat pieces of `BLOCK_BYTES` in a dtype.

    Infinities and NaN stay what they are.

    Raises:
        CheckpointError: a number is too large for the dtype; it says which tensor, by its name.
    """
    # A cast turns large numbers into infinities silently; a source's own infinities may stay.
    is_packed = not dtype.is_floating_point  # bytes that encode numbers
    is_narrower = not is_packed and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    for start, end in _steps(tensor, first, last):
        rows = tensor.read(start, end)
        written = rows.to(dtype)
        if is_narrower and bool((written.isinf() & rows.isfinite()).any()):
            raise _too_large(tensor, dtype, name)
        yield written.reshape(-1)


def _steps(tensor: TensorRows, first: int, last: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // max(1, row_bytes(tensor.shape, tensor.dtype)))
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _too_large(tensor: TensorRows, dtype: torch.dtype, name: str) -> CheckpointError:
    largest = 0.0
    for start, end in _steps(tensor, 0, row_count(tensor.shape)):
        rows = tensor.read(start, end)
        largest = max(largest, float(rows.where(rows.isfinite(), 0).abs().max()))
    word = dtype_name(dtype)
    return CheckpointError(
        f"{name or 'a tensor'} does not fit {word}: its largest number is {largest:.6g}, and "
        f"{word} ends at {torch.finfo(dtype).max:.6g}",
        "write bf16 or fp32",
    )


def as_bytes(flat: Tensor) -> memoryview:
    """Return the memory of a flat, contiguous tensor on the CPU."""
    memory: Any = flat.detach().view(torch.uint8).numpy()
    return memoryview(memory)


def differs(written: TensorRows, expected: TensorRows, dtype: torch.dtype) -> bool:
    """Return whether a tensor read back is not, bit for bit, what was to be written."""
    if written.shape != expected.shape or written.dtype != dtype:
        return True
    rows = row_count(expected.shape)
    if not nbytes(expected.shape, dtype):
        return False
    widest = max(row_bytes(expected.shape, expected.dtype), row_bytes(expected.shape, dtype))
    step = max(1, BLOCK_BYTES // max(1, widest))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        theirs = expected.read(first, last).to(dtype)
        if not torch.equal(_bits(written.read(first, last)), _bits(theirs)):
            return True
    return False


def _bits(tensor: Tensor) -> Tensor:
    # NaN differs from itself, and -0.0 equals 0.0: bits are compared.
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class FileTensor:
    """A tensor that lies in a file as it would in memory."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows.

        Raises:
            CheckpointError: the file ends before them.
        """
        row = row_bytes(self.shape, self.dtype)
        buffer = torch.empty((last - first) * row, dtype=torch.uint8)
        view, position = as_bytes(buffer), self.offset + first * row
        # preadv needs no shared position: several threads read one tensor.
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            while view:
                count = os.preadv(descriptor, [view], position)
                if not count:
                    raise CheckpointError(f"{self.file} ends early", "download it again")
                view, position = view[count:], position + count
        finally:
            os.close(descriptor)
        return buffer.view(self.dtype).view(_part(self.shape, first, last))


@dataclass(frozen=True)
class InMemoryTensor:
    """A tensor in memory, on any device."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        part = self.tensor.detach()[first:last] if self.tensor.dim() else self.tensor.detach()
        return part.cpu().contiguous()


class StoredChunk(NamedTuple):
    """A part of a tensor, and where it begins in the tensor."""

    start: tuple[int, ...]
    tensor: TensorRows


@dataclass(frozen=True)
class ConcatenatedTensor:
    """A tensor put together from parts that lie apart.

    Args:
        parts: together they cover every element once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredChunk, ...]

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        rows = torch.empty(_part(self.shape, first, last), dtype=self.dtype)
        start = (first, *(0,) * (len(self.shape) - 1)) if self.shape else ()
        fill_box(rows, Box(start, tuple(rows.shape)), self.parts)
        return rows


def fill_box(target: Tensor, box: Box, parts: Iterable[StoredChunk]) -> None:
    """Fill one box of a tensor.

    Args:
        target: memory for the box alone.
        box: where it lies in the tensor.
        parts: stored parts, which cover the whole tensor.
    """
    for start, stored in parts:
        common = box.overlap(Box(start, stored.shape))
        if common is None:
            continue
        source = common.shift(start)
        first, count = (source.start[0], source.sizes[0]) if source.start else (0, 1)
        rows = source.columns(stored.read(first, first + count))
        common.shift(box.start).view(target).copy_(rows)


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor that is computed, rows at a time, from another one of the same dtype."""

    source: TensorRows
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.source.dtype


@dataclass(frozen=True)
class MeanRows:
    """Rows that all equal the mean of another tensor's rows.

    Added tokens start so (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
    Models"): a new token then takes little probability from the others.
    """

    source: TensorRows
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.source.dtype

    @cached_property
    def mean(self) -> Tensor:
        """One row, summed in fp64 so that the result does not depend on the blocks read."""
        rows = row_count(self.source.shape)
        total = torch.zeros(self.source.shape[1:], dtype=torch.float64)
        for start, end in _steps(self.source, 0, rows):
            total += self.source.read(start, end).double().sum(0)
        return (total / rows).to(self.dtype)

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        return self.mean.expand(last - first, *self.shape[1:]).contiguous()


def add_mean_rows(stored: TensorRows, rows: int) -> ConcatenatedTensor:
    """Return a tensor of `rows` rows: the stored ones, then rows that equal their mean."""
    first, *others = stored.shape
    added = MeanRows(stored, (rows - first, *others))
    zeros = (0,) * len(others)
    parts = (StoredChunk((0, *zeros), stored), StoredChunk((first, *zeros), added))
    return ConcatenatedTensor(stored.dtype, (rows, *others), parts)


def _part(shape: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    return (last - first, *shape[1:]) if shape else ()
