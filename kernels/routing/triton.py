"""The routing plan and the permutations in Triton; see `reference` for what they compute.

The plan takes three launches: each block of choices counts its experts; the counts of the blocks
before are summed for each expert; then every choice finds its place, as the rows of smaller
experts + those of this expert in earlier blocks + those before it in its own block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import PermuteIndices, RoutingPlan, aligned_ends, tile_bound, with_sizes

CHOICES = 256
"""Choices a block; each is compared with all others of its block."""
ENTRIES = 32
"""Entries of the tile map a program."""
PLACES = 64
"""Places of the permuted rows a program."""


@triton.jit(do_not_specialize=["size"])
def _count_kernel(sel_ptr, partial_ptr, size, E, E_BLOCK: tl.constexpr, CHOICES: tl.constexpr):
    block = tl.program_id(0)
    at = block * CHOICES + tl.arange(0, CHOICES)
    sel = tl.load(sel_ptr + at, mask=at < size, other=0).to(tl.int32)
    # Counts of one block; the order of its rows is found in the last launch.
    counts = tl.histogram(sel, E_BLOCK, mask=at < size)
    expert = tl.arange(0, E_BLOCK)
    tl.store(partial_ptr + block.to(tl.int64) * E + expert, counts, mask=expert < E)


@triton.jit(do_not_specialize=["blocks"])
def _sum_kernel(partial_ptr, counts_ptr, blocks, E, E_PART: tl.constexpr, ROWS: tl.constexpr):
    """Replace each block's counts by those of the blocks before it."""
    expert = tl.program_id(0) * E_PART + tl.arange(0, E_PART)
    total = tl.zeros((E_PART,), tl.int32)
    # One program goes through all blocks of some experts: the sum needs no other launch.
    for first in range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        at = partial_ptr + block[:, None].to(tl.int64) * E + expert[None, :]
        mask = (block < blocks)[:, None] & (expert < E)[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + expert, total, mask=expert < E)


@triton.jit
def write_tiles(entry, counts, tile_map_ptr, n_tiles_ptr, bound, BLOCK_M: tl.constexpr):
    """Write some entries of the tile map of groups of rows; the first program, its length.

    Args:
        entry: int32 [entries], which.
        counts: int32, rows of each group.
        tile_map_ptr: where to.
        n_tiles_ptr: the number of all tiles.
        bound: length of the map.
        BLOCK_M: rows a tile.
    """
    per_group = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(per_group, 0)
    total = tl.sum(per_group, 0)
    is_before = ends[None, :] <= entry[:, None]
    group = tl.sum(is_before.to(tl.int32), 1)
    first = tl.sum(tl.where(is_before, per_group[None, :], 0), 1)
    # An expert and its tile in one int32: one load for each tile of the product.
    packed = tl.where(entry < total, (group << 16) | (entry - first), -1)
    tl.store(tile_map_ptr + entry, packed, mask=entry < bound)
    tl.store(n_tiles_ptr + entry, total, mask=entry == 0)


@triton.jit(do_not_specialize=["size", "blocks", "bound"])
def _place_kernel(
    sel_ptr,
    partial_ptr,
    counts_ptr,
    offs_ptr,
    starts_ptr,
    row_token_ptr,
    slot_ptr,
    tile_map_ptr,
    n_tiles_ptr,
    size,
    E,
    A,
    blocks,
    bound,
    BLOCK_M: tl.constexpr,
    E_BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    OTHERS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    expert = tl.arange(0, E_BLOCK)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    ends = tl.cumsum(counts, 0)
    block = tl.program_id(0)
    if block < blocks:
        own = tl.arange(0, CHOICES)
        at = block * CHOICES + own
        sel = tl.load(sel_ptr + at, mask=at < size, other=0).to(tl.int32)
        # Where the expert's rows start, then those of earlier blocks, then those in this block.
        row = tl.gather(ends - counts, sel, 0)
        row += tl.load(partial_ptr + block.to(tl.int64) * E + sel, mask=at < size, other=0)
        for first in range(0, CHOICES, OTHERS):
            other = first + tl.arange(0, OTHERS)
            there = block * CHOICES + other
            their = tl.load(sel_ptr + there, mask=there < size, other=-1).to(tl.int32)
            # Comparing all pairs of a block keeps the order of tokens; 256 x 256 is little work.
            is_before = (their[None, :] == sel[:, None]) & (other[None, :] < own[:, None])
            row += tl.sum(is_before.to(tl.int32), 1)
        tl.store(slot_ptr + at, row, mask=at < size)
        tl.store(row_token_ptr + row, at // A, mask=at < size)
    else:
        # The programs after the last block write the tile map and the ends.
        part = block - blocks
        if part == 0:
            tl.store(offs_ptr + expert, ends, mask=expert < E)
            tl.store(starts_ptr + expert, ends - counts, mask=expert < E)
            tl.store(starts_ptr + 1 + expert, ends, mask=expert == E - 1)
        entry = part * ENTRIES + tl.arange(0, ENTRIES)
        write_tiles(entry, counts, tile_map_ptr, n_tiles_ptr, bound, BLOCK_M)


def routing_plan(sel: Tensor, num_experts: int, block_m: int = 128) -> RoutingPlan:
    """Return the plan for the experts that tokens chose; see `reference.routing_plan`."""
    sel = sel.contiguous()
    size, E, A = sel.numel(), num_experts, sel.shape[1]
    bound = tile_bound(size, E, block_m)
    blocks = triton.cdiv(size, CHOICES)
    partial = _ints(sel, blocks, E)
    plan = RoutingPlan(
        counts=_ints(sel, E),
        offs=_ints(sel, E),
        starts=_ints(sel, E + 1),
        row_token=_ints(sel, size),
        slot=_ints(sel, *sel.shape),
        tile_map=_ints(sel, bound),
        n_tiles=_ints(sel, 1),
    )
    E_BLOCK = triton.next_power_of_2(E)
    if blocks:
        _count_kernel[(blocks,)](sel, partial, size, E, E_BLOCK=E_BLOCK, CHOICES=CHOICES)
    # A few experts a program, so that the sums over blocks run side by side.
    E_PART = min(E_BLOCK, 8)
    _sum_kernel[(triton.cdiv(E, E_PART),)](partial, plan.counts, blocks, E, E_PART=E_PART, ROWS=256)
    _place_kernel[(blocks + triton.cdiv(bound, ENTRIES),)](
        sel,
        partial,
        *plan,
        size,
        E,
        A,
        blocks,
        bound,
        BLOCK_M=block_m,
        E_BLOCK=E_BLOCK,
        CHOICES=CHOICES,
        OTHERS=32,
        ENTRIES=ENTRIES,
    )
    return plan


def _ints(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@triton.jit(do_not_specialize=["max_len"])
def _indices_kernel(
    tokens_ptr,
    sources_ptr,
    ends_ptr,
    out_ptr,
    max_len,
    E,
    num_ranks,
    E_BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    expert = tl.arange(0, E_BLOCK)
    ends = tl.load(ends_ptr + expert, mask=expert < E, other=0)
    # A search by comparison: experts are few.
    is_before = (ends[None, :] <= place[:, None]) & (expert < E)[None, :]
    own = tl.sum(is_before.to(tl.int32), 1)
    is_real = own < E
    within = place - tl.max(tl.where(is_before, ends[None, :], 0), 1)
    index = tl.full((PLACES,), -1, tl.int64)
    for rank in range(0, num_ranks):
        rows = tl.load(tokens_ptr + rank * E + own, mask=is_real, other=0)
        source = tl.load(sources_ptr + rank * E + own, mask=is_real, other=0)
        index = tl.where((within >= 0) & (within < rows), source + within, index)
        # What is left of the place within the rows of the ranks that follow.
        within -= rows
    tl.store(out_ptr + place, index.to(tl.int32), mask=place < max_len)


def generate_permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    *,
    pad_empty: bool = True,
) -> PermuteIndices:
    """Return the order that groups rows by expert; see `reference.generate_permute_indices`."""
    tokens = tokens_per_expert_group.contiguous()
    counts = tokens.view(num_ranks, experts_per_rank)
    ends = aligned_ends(counts, alignment, pad_empty)
    sources = tokens.cumsum(0, dtype=torch.int32) - tokens
    indices = _ints(tokens, max_len)
    if max_len:
        _indices_kernel[(triton.cdiv(max_len, PLACES),)](
            tokens,
            sources,
            ends,
            indices,
            max_len,
            experts_per_rank,
            num_ranks,
            E_BLOCK=triton.next_power_of_2(experts_per_rank),
            PLACES=PLACES,
        )
    return with_sizes(indices, ends, max_len)
