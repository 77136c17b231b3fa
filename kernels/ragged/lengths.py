"""Where the samples of a flat row begin and end, and how attention groups them into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")
SMALLEST_SPREAD = 16
"""positions by which the lengths of a block may always differ: a block of its own costs more"""
LARGEST_SPREAD = 4
"""a block's shortest sample may be shorter than its longest by a part in so many"""


class SampleBlock(NamedTuple):
    """Samples of about one length, which attention computes as rows of a padded block."""

    samples: int
    """rows"""
    width: int
    """positions of each row: the length of the longest sample"""


class SampleBlocks(NamedTuple):
    """All positions of a flat row as padded blocks, P positions in all."""

    shapes: tuple[SampleBlock, ...]
    """the blocks, one after the other"""
    sources: Tensor
    """[P] int64: the flat position that each padded one is copied from; padding repeats the last
    position of its sample"""
    slots: Tensor
    """[T] int64: the padded position of each flat one"""


class SampleLengths:
    """The lengths of the samples of a flat row [T], in order; each is 1 at least.

    Args:
        lengths: positions of each sample.
        device: where the tensors are.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device = CPU) -> None:
        self.lengths = tuple(lengths)
        self.device = device

    def __len__(self) -> int:
        """Return the number of samples, B."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """The length of the longest sample."""
        return max(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each sample begins, and where the last one ends: B + 1 numbers."""
        return (0, *accumulate(self.lengths))

    @property
    def total(self) -> int:
        """The positions of all samples, T."""
        return self.starts[-1]

    @cached_property
    def offsets(self) -> Tensor:
        """`starts` as a tensor, [B + 1] int32: `cu_seqlens` of attention kernels."""
        return self._place(torch.tensor(self.starts, dtype=torch.int32))

    @cached_property
    def counts(self) -> Tensor:
        """The lengths as a tensor, [B] int64."""
        return self._place(torch.tensor(self.lengths, dtype=torch.int64))

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each position's sample, [T] int64."""
        numbers, counts = torch.arange(len(self)), torch.tensor(self.lengths)
        # With the size, which a simulation without values could not find.
        return self._place(numbers.repeat_interleave(counts, output_size=self.total))

    @cached_property
    def blocks(self) -> SampleBlocks:
        """The samples in blocks of similar lengths."""
        order = sorted(range(len(self)), key=self.lengths.__getitem__, reverse=True)
        shapes: list[SampleBlock] = []
        sources, slots, end = [], torch.empty(self.total, dtype=torch.int64), 0
        for members in self._group(order):
            width = self.lengths[members[0]]
            shapes.append(SampleBlock(len(members), width))
            position = torch.arange(width)
            for sample in members:
                start, count = self.starts[sample], self.lengths[sample]
                # Padding copies a position that exists, so that what is computed for it is finite.
                sources.append(start + position.clamp(max=count - 1))
                slots[start : start + count] = position[:count] + end
                end += width
        return SampleBlocks(tuple(shapes), self._place(torch.cat(sources)), self._place(slots))

    def _group(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield the samples of each block, from samples in the order of falling lengths."""
        members: list[int] = []
        for sample in order:
            if members:
                width = self.lengths[members[0]]
                spread = max(SMALLEST_SPREAD, width // LARGEST_SPREAD)
                if self.lengths[sample] < width - spread:
                    yield members
                    members = []
            members.append(sample)
        yield members

    def select(self, first: int, stop: int) -> SampleLengths:
        """Return the lengths of samples `first` to `stop - 1`."""
        return SampleLengths(self.lengths[first:stop], self.device)

    def mask(self, chosen: Sequence[bool]) -> SampleLengths:
        """Return the lengths of the samples that are chosen."""
        return SampleLengths([*compress(self.lengths, chosen)], self.device)

    def to(self, device: torch.device) -> SampleLengths:
        """Return the lengths with all tensors on a device; the host does not wait for the copies.

        The tensors are made here, once a batch, and not in a layer: a layer that is recomputed
        finds what it found before.
        """
        moved = SampleLengths(self.lengths, device)
        for name in ("offsets", "counts", "numbers", "blocks"):
            getattr(moved, name)
        return moved

    def _place(self, made: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return made.pin_memory().to(self.device, non_blocking=True)
        return made.to(self.device)
