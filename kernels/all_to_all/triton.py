"""Rows pulled out of the memory of other GPUs; see `exchange.all_to_all_v` for the result.

Each rank leaves its rows and its splits where the others can read them. A kernel of each meets
the same one of the others, reads what is its own, and meets them again: then rows may be
overwritten. They meet by signals in memory that all can write, one for each program and rank; a
signal is 1 once it is sent, and 0 again once it is received.

All programs of a launch must run at the same time, since they wait for those of other ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .symmetric import header_words

BLOCK = 2048
"""words of eight bytes at a time"""


@triton.jit
def _meet(signals_ptr, rank, world):
    """Wait for the same program of every rank, and for what it wrote before."""
    tl.debug_barrier()  # all threads are done, before one of them says so
    program = tl.program_id(0) * world
    for other in range(world):
        theirs = tl.load(signals_ptr + other).to(tl.pointer_type(tl.int32)) + program + rank
        while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
            pass
    for other in range(world):
        ours = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32)) + program + other
        while tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "world", "max_rows"])
def _pull_kernel(
    out_ptr,
    received_ptr,
    buffers_ptr,
    signals_ptr,
    rank,
    world,
    max_rows,
    words,
    RANKS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _meet(signals_ptr, rank, world)
    each = tl.arange(0, RANKS)
    there = each < world
    buffers = tl.load(buffers_ptr + each, mask=there, other=0).to(tl.pointer_type(tl.int64))
    counts = tl.load(buffers + rank, mask=there, other=0)
    # All programs know the counts; one writes them.
    first_program = tl.program_id(0) == 0
    tl.store(received_ptr + each, counts, mask=there & first_program)
    place = tl.program_id(0) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    width = tl.multiple_of(words.to(tl.int64), 2)  # rows are multiples of 16 bytes
    for step in range(world):
        other = (rank + step) % world  # not all ranks read from the same one
        theirs = tl.load(buffers_ptr + other).to(tl.pointer_type(tl.int64))
        # What the other rank sends to each; ours begins after those of lower ranks.
        splits = tl.load(theirs + each, mask=there, other=0)
        before = tl.sum(tl.where(each < rank, splits, 0))
        count = tl.sum(tl.where(each == rank, splits, 0))
        # Rows are kept in the order of the ranks that sent them.
        row = tl.sum(tl.where(each < other, counts, 0))
        fit = tl.maximum(tl.minimum(count, max_rows - row), 0) * width
        # A rank may promise more rows than it has; the rest is zeros.
        held = tl.maximum(tl.minimum(count, tl.load(theirs + world) - before), 0) * width
        source = tl.multiple_of(theirs + HEADER + before * width, 16)
        target = tl.multiple_of(out_ptr + row * width, 16)
        for start in range(place, fit, stride):
            word = start + tl.arange(0, BLOCK)
            value = tl.load(source + word, mask=(word < fit) & (word < held), other=0)
            tl.store(target + word, value, mask=word < fit)
    came = tl.minimum(tl.sum(counts), max_rows) * width
    for start in range(place, max_rows * width - came, stride):
        word = start + tl.arange(0, BLOCK)
        target = tl.multiple_of(out_ptr + came, 16)
        zero = tl.zeros((BLOCK,), tl.int64)
        tl.store(target + word, zero, mask=word < max_rows * width - came)
    # Rows may be overwritten only after every rank has read its own.
    _meet(signals_ptr, rank, world)


def pull(
    max_rows: int, words: int, buffers: Tensor, signals: Tensor, rank: int, programs: int
) -> tuple[Tensor, Tensor]:
    """Return the rows that all ranks have for this one, and how many each had.

    Args:
        max_rows: how many the result has room for.
        words: int64 numbers a row, an even number.
        buffers: int64 [W], the addresses of the ranks' buffers (`symmetric`).
        signals: int64 [W], those of their signals: int32 [programs, W], 0 between two calls.
        rank: our own.
        programs: the same on every rank, and no more than run at once.

    Returns:
        int64 [max_rows, words] and [W].
    """
    world = len(buffers)
    out = torch.empty((max_rows, words), dtype=torch.int64, device=buffers.device)
    received = torch.empty(world, dtype=torch.int64, device=buffers.device)
    _pull_kernel[(programs,)](
        out,
        received,
        buffers,
        signals,
        rank,
        world,
        max_rows,
        words,
        RANKS=triton.next_power_of_2(world),
        HEADER=header_words(world),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out, received
