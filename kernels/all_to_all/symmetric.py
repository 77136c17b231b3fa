"""Buffers that all GPUs of a group can read (torch's symmetric memory), and the exchange by them.

A buffer starts with its rank's splits and how many rows it holds; the rows follow, at a multiple
of 16 bytes. All is counted in words of eight bytes, whatever the dtype of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..registry import load
from ..torch_private import symmetric_memory

MOST_PROGRAMS = 64
"""They wait for those of other ranks, so that all must run at once, beside what else a GPU does."""
ROW_BYTES = 16
WORD = torch.int64


def header_words(world: int) -> int:
    """Return where rows begin in a buffer."""
    return world + 2 - world % 2


@dataclass(frozen=True)
class Buffers:
    """One rank's side of a group's buffers."""

    own: Tensor
    """int64 [header + max_rows * words], which the others read"""
    addresses: Tensor
    """int64 [W], of the buffers"""
    signals: Tensor
    """int64 [W], of the signals: int32 [programs, W], 0 at first"""
    rank: int
    max_rows: int
    programs: int

    def exchange(self, x: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `exchange.all_to_all_v` does, without waiting for the device."""
        world = len(self.addresses)
        rows = x.contiguous().view(WORD)
        # In stream order before the kernel's signals: others read only after they have met.
        self.own[:world].copy_(splits)
        self.own[world].fill_(len(x))
        begin = header_words(world)
        self.own[begin : begin + rows.numel()].copy_(rows.flatten())
        pull = load(f"{__package__}.triton:pull")
        out, received = pull(
            self.max_rows, rows.shape[1], self.addresses, self.signals, self.rank, self.programs
        )
        return out.view(x.dtype), received


def allocate(
    group: dist.ProcessGroup, device: torch.device, max_rows: int, row_bytes: int
) -> Buffers:
    """Return buffers for rows of that size; every rank of the group calls this."""
    world = group.size()
    words = header_words(world) + max_rows * row_bytes // WORD.itemsize
    own = symmetric_memory.empty(words, dtype=WORD, device=device)
    handle = symmetric_memory.rendezvous(own, group)
    # One signal for each rank and program.
    signals = handle.signal_pad_size // (torch.int32.itemsize * world)
    return Buffers(
        own,
        torch.tensor(handle.buffer_ptrs, dtype=WORD, device=device),
        torch.tensor(handle.signal_pad_ptrs, dtype=WORD, device=device),
        handle.rank,
        max_rows,
        min(MOST_PROGRAMS, signals),
    )
