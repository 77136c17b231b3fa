"""How the programs of a grouped product share its tiles, in Triton.

A small kernel lists the tiles of all groups on the device, so that the host need not know how many
rows a group has. Rows after the last group are a group of their own, without a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..registry import INTERPRETED
from ..routing.reference import tile_bound
from ..routing.triton import write_tiles
from .launch import AMPERE, Tiling

ENTRIES = 32
"""Entries of the tile map a program."""
GROUP_M = 8
"""Tiles that read the same columns of a weight one after another, while the cache holds them."""


def current_arch() -> int:
    """Return the compute capability of the GPU in use, as 90 for Hopper."""
    # The interpreter has no driver; what runs everywhere runs there.
    return AMPERE if INTERPRETED else int(driver.active.get_current_target().arch)


def num_programs(tiling: Tiling) -> int:
    """Return how many programs of a tiling run at the same time on the GPU in use."""
    if INTERPRETED:
        return 2  # one after another
    active = driver.active
    properties = active.utils.get_device_properties(active.get_current_device())
    return int(properties["multiprocessor_count"]) * tiling.per_processor


def list_tiles(offs: Tensor, M: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return the tile map of the groups and of the rows behind them, and a pair of numbers.

    The first number is the length of the map, the second `take_tile`'s counter for one launch.
    """
    # The rows after the last group are group E, which stores zeros.
    E = len(offs)
    bound = tile_bound(M, E + 1, block_m)
    tile_map, n_tiles = offs.new_empty(bound), offs.new_empty(2)
    _list_tiles_kernel[(triton.cdiv(bound, ENTRIES),)](
        offs,
        tile_map,
        n_tiles,
        M,
        E,
        bound,
        BLOCK_M=block_m,
        E_BLOCK=triton.next_power_of_2(E + 1),
        ENTRIES=ENTRIES,
    )
    return tile_map, n_tiles


@triton.jit(do_not_specialize=["M", "bound"])
def _list_tiles_kernel(
    offs_ptr,
    tile_map_ptr,
    n_tiles_ptr,
    M,
    E,
    bound,
    BLOCK_M: tl.constexpr,
    E_BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    expert = tl.arange(0, E_BLOCK)
    ends = tl.load(offs_ptr + expert, mask=expert < E, other=M)
    starts = tl.load(offs_ptr + expert - 1, mask=(expert > 0) & (expert <= E), other=0)
    counts = tl.where(expert <= E, ends - starts, 0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    write_tiles(entry, counts, tile_map_ptr, n_tiles_ptr, bound, BLOCK_M)
    if tl.program_id(0) == 0:
        tl.store(n_tiles_ptr + 1, 0)


@triton.jit
def take_tile(counter_ptr):
    """Return the next tile that no program has taken.

    A fixed share for each program would wait for those that found no multiprocessor because a
    collective holds it, and for those whose tiles are longer.
    """
    return tl.atomic_add(counter_ptr, 1, sem="relaxed")


@triton.jit
def find_tile(
    tile,
    tiles_m,
    tiles_n,
    tile_map_ptr,
    offs_ptr,
    M,
    E,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return the expert of a tile, its first row, the end of its group, and its column."""
    # Tiles of a few rows go through all columns before the next rows begin.
    per_group = GROUP_M * tiles_n
    first = tile // per_group * GROUP_M
    # The last group of tiles may be smaller.
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % per_group
    entry = tl.load(tile_map_ptr + first + within % rows)
    expert = entry >> 16
    start = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_ptr + expert, mask=expert < E, other=M)
    return expert, start + (entry & 0xFFFF) * BLOCK_M, end, within // rows
