"""The plan that routes tokens to experts (GShard, arXiv:2006.16668, without its capacity).

Each token chose A experts. Their T * A rows are sorted by expert, rows of one expert in the order
of their tokens, as the permutation of Megablocks (arXiv:2211.15841, section 5.1) does. Nothing
here waits for the device: shapes depend on the number of tokens alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_BITS = 16


class RoutingPlan(NamedTuple):
    """Where each token's rows lie once they are sorted by expert."""

    counts: Tensor
    """int32 [E]: rows of each expert."""
    offs: Tensor
    """int32 [E]: the end of each expert's rows."""
    starts: Tensor
    """int32 [E + 1]: the start of each expert's rows, and the end of the last."""
    row_token: Tensor
    """int32 [T * A]: the token of each sorted row."""
    slot: Tensor
    """int32 [T, A]: the sorted row of each choice."""
    tile_map: Tensor
    """int32 [ceil(T * A / block_m) + E]: `expert << 16 | tile of that expert`, -1 past the last."""
    n_tiles: Tensor
    """int32 [1]: how many entries of tile_map are in use."""


class PermuteIndices(NamedTuple):
    """Where rows that came from several ranks go, so that each expert's lie together."""

    indices: Tensor
    """int32 [max_len]: the row that each place takes; -1 where there is padding."""
    sizes: Tensor
    """int32 [E]: rows of each expert, padding included."""
    offsets: Tensor
    """int32 [E]: the end of each expert's rows."""
    overflowed: Tensor
    """bool [1]: max_len was too small; what lies beyond it is dropped."""


def routing_plan(sel: Tensor, num_experts: int, *, block_m: int = 128) -> RoutingPlan:
    """Return the plan for the experts that tokens chose.

    Args:
        sel: [T, A] of any integer type, each in [0, num_experts).
        num_experts: E.
        block_m: rows a tile of the products that will read `tile_map`.
    """
    plan = untiled_plan(sel, num_experts)
    bound = tile_bound(sel.numel(), num_experts, block_m)
    tile_map, n_tiles = tiles(plan.counts, bound, block_m)
    return plan._replace(tile_map=tile_map, n_tiles=n_tiles)


def untiled_plan(sel: Tensor, num_experts: int) -> RoutingPlan:
    """Return a plan whose tile map is empty, for products that read none.

    Args:
        sel: [T, A] of any integer type, each in [0, num_experts).
        num_experts: E.
    """
    num_choices = sel.shape[1]
    flat = sel.reshape(-1).long()
    # Stable: rows of one expert stay in the order of their tokens, and sums repeat bit for bit.
    order = flat.argsort(stable=True)
    rows = torch.arange(len(flat), dtype=torch.int32, device=sel.device)
    # Not bincount: its length depends on the data, so it waits for the device.
    counts = torch.zeros(num_experts, dtype=torch.int32, device=sel.device)
    counts.scatter_add_(0, flat, torch.ones_like(rows))
    # Neither is a view of the other: torch.compile (2.11) finds no stride of a slice that it has
    # not stored, where `torch.searchsorted` asks for one.
    offs = counts.cumsum(0, dtype=torch.int32)
    slot = torch.empty_like(rows).scatter_(0, order, rows)
    return RoutingPlan(
        counts,
        offs,
        F.pad(offs, (1, 0)),
        (order // max(num_choices, 1)).int(),
        slot.view(sel.shape),
        counts.new_empty(0),
        counts.new_zeros(1),
    )


def tile_bound(rows: int, groups: int, block_m: int) -> int:
    """Return how many tiles so many rows need at most, however they fall into groups.

    Raises:
        ValueError: they are more than an entry of the tile map can count.
    """
    if rows > block_m << TILE_BITS or groups >= 1 << (31 - TILE_BITS):
        raise ValueError(
            f"{rows:,} rows in {groups:,} groups: a tile map holds {block_m << TILE_BITS:,} rows "
            f"(of {block_m} a tile) in {(1 << (31 - TILE_BITS)) - 1:,} groups; split the rows"
        )
    return -(-rows // block_m) + groups


def tiles(counts: Tensor, bound: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return the tile map of groups of rows, -1 after its last entry, and its length.

    Args:
        counts: int32 [E], rows of each group.
        bound: length of the map.
        block_m: rows a tile.
    """
    per_group = (counts + block_m - 1) // block_m
    ends = per_group.cumsum(0, dtype=torch.int32)
    # As many entries as could be needed: the real number is known on the device alone.
    entry = torch.arange(bound, dtype=torch.int32, device=counts.device)
    group = torch.searchsorted(ends, entry, right=True).clamp(max=len(counts) - 1)
    packed = (group << TILE_BITS) | (entry - (ends - per_group)[group])
    return torch.where(entry < ends[-1], packed, -1).int(), ends[-1:].clone()


def aligned_ends(counts: Tensor, alignment: int, pad_empty: bool) -> Tensor:
    """Return int64 [E], where each expert's padded rows end, also beyond max_len."""
    per_expert = counts.sum(0, dtype=torch.int64)
    if pad_empty:
        per_expert = per_expert.clamp(min=alignment)
    return ((per_expert + alignment - 1) // alignment * alignment).cumsum(0)


def generate_permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    *,
    pad_empty: bool = True,
) -> PermuteIndices:
    """Return the order that groups rows by expert, each expert's count rounded up.

    After an all-to-all the rows of a rank lie together, sorted by expert; products want the rows
    of an expert together, whatever rank they came from.

    Args:
        tokens_per_expert_group: int32 [num_ranks * experts_per_rank], rank after rank.
        experts_per_rank: E.
        num_ranks: how many ranks sent rows.
        max_len: length of the result; fixed, so that nothing waits for the counts.
        alignment: each expert's count is rounded up to a multiple.
        pad_empty: an expert without rows gets `alignment` rows of padding too.
    """
    counts = tokens_per_expert_group.view(num_ranks, experts_per_rank)
    ends = aligned_ends(counts, alignment, pad_empty)
    place = torch.arange(max_len, device=counts.device)
    expert = torch.searchsorted(ends, place, right=True).clamp(max=experts_per_rank - 1)
    within = place - (ends - torch.diff(ends, prepend=ends.new_zeros(1)))[expert]
    in_ranks = counts.cumsum(0)  # of each expert, up to and with each rank
    rank = (within.unsqueeze(1) >= in_ranks.T[expert]).sum(1)
    # Behind the rows of all ranks an expert's places are padding.
    is_row = (rank < num_ranks) & (place < ends[-1])
    rank = rank.clamp(max=num_ranks - 1)
    sources = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    before = in_ranks[rank, expert] - counts[rank, expert]
    indices = torch.where(is_row, sources[rank, expert] + within - before, -1).int()
    return with_sizes(indices, ends, max_len)


def with_sizes(indices: Tensor, ends: Tensor, max_len: int) -> PermuteIndices:
    """Return the indices with sizes and offsets, cut off at max_len."""
    offsets = ends.clamp(max=max_len).int()
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return PermuteIndices(indices, sizes, offsets, ends[-1:] > max_len)
