"""How the grouped products are cut into tiles: on which GPU, with which kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .op import ALIGNMENT

# Compute capabilities; from SMALL_BLACKWELL on, GPUs have less shared memory.
AMPERE, HOPPER, BLACKWELL, SMALL_BLACKWELL = 80, 90, 100, 120


@dataclass(frozen=True)
class Tiling:
    """What a launch fixes; the defaults come from the table of compiled kernels."""

    block_m: int
    """rows a tile"""
    block_n: int
    """columns of the weight (of dw: its rows) a tile"""
    block_k: int
    """length of a step of the sum (of dw: its columns a tile)"""
    warps: int
    stages: int
    tma: bool = False
    """tiles are copied by the tensor memory accelerator, not by threads"""
    halves: bool = False
    """a tile is written in two halves, so that a further stage fits"""
    per_processor: int = 1
    """programs that a multiprocessor has room for"""


POINTERS = Tiling(128, 128, 64, warps=8, stages=3)
# The other spills there.
BLACKWELL_POINTERS = Tiling(64, 128, 64, warps=4, stages=4, per_processor=2)
POINTERS_HALF = Tiling(128, 64, 64, warps=4, stages=3, per_processor=2)
BLACKWELL_POINTERS_HALF = Tiling(64, 64, 64, warps=4, stages=4, per_processor=2)
# For what threads load number by number.
SMALL = Tiling(64, 64, 32, warps=4, stages=3, per_processor=2)
TMA = Tiling(128, 256, 64, warps=8, stages=4, tma=True, halves=True)
# Two of these are resident: one multiplies while the other fills its pipeline or stores.
TMA_HALF = Tiling(128, 128, 64, warps=8, stages=3, tma=True, halves=True, per_processor=2)
TMA_QUARTER = Tiling(128, 64, 64, warps=4, stages=4, tma=True, per_processor=2)
DW_POINTERS = Tiling(64, 128, 128, warps=8, stages=3)
DW_SMALL = Tiling(32, 64, 64, warps=4, stages=3, per_processor=2)
DW_TMA = Tiling(64, 128, 128, warps=8, stages=3, tma=True, per_processor=2)


def are_aligned(*tensors: Tensor) -> bool:
    """Return whether all rows of all these tensors start where 16 bytes are read at once."""
    return all(
        t.data_ptr() % ALIGNMENT == 0 and t.shape[-1] * t.element_size() % ALIGNMENT == 0
        for t in tensors
    )


def mm_tiling(arch: int, x: Tensor, w: Tensor, y: Tensor, *, trans_w: bool) -> Tiling:
    """Return how `grouped_mm` is cut on a GPU of this compute capability."""
    # The products of fp32 stay exact: no work for tensor cores, which would round them.
    if x.dtype == torch.float32 or not are_aligned(x, w):
        return SMALL
    # A tile of untransposed weights must not reach into the next expert's.
    is_cut = trans_w or w.shape[1] % TMA.block_k == 0
    # The accelerator stores 16-bit results; wider ones would need twice the shared memory.
    if HOPPER <= arch < SMALL_BLACKWELL and is_cut and y.element_size() == 2 and are_aligned(y):
        return _by_width((TMA, TMA_HALF, TMA_QUARTER), y.shape[1], x.shape[1])
    if BLACKWELL <= arch < SMALL_BLACKWELL:
        return _by_width((BLACKWELL_POINTERS, BLACKWELL_POINTERS_HALF), y.shape[1], x.shape[1])
    return _by_width((POINTERS, POINTERS_HALF), y.shape[1], x.shape[1])


COLUMN_COST = {256: 1.0, 128: 1.0625, 64: 1.3}
"""block_n -> time of a column relative to the widest tile's, which reads its operands least often;
modelled, not measured"""
SHORT_SUM, SHORT_SUM_COST = 512, 0.15
"""With sums so short, filling and draining the pipeline adds this to a program that is alone on its
multiprocessor; of two, one computes meanwhile."""


def _by_width(tilings: tuple[Tiling, ...], N: int, K: int) -> Tiling:
    """Return the tiling that takes the least time for N columns and sums of K."""

    def cost(tiling: Tiling) -> float:
        columns = -(-N // tiling.block_n) * tiling.block_n
        is_filling = K <= SHORT_SUM and tiling.per_processor == 1
        return columns * (COLUMN_COST[tiling.block_n] + SHORT_SUM_COST * is_filling)

    return min(tilings, key=cost)


def dw_tiling(arch: int, dy: Tensor, x: Tensor) -> Tiling:
    """Return how `grouped_dw` is cut on a GPU of this compute capability."""
    if x.dtype == torch.float32 or not are_aligned(dy, x):
        return DW_SMALL
    return DW_TMA if HOPPER <= arch < SMALL_BLACKWELL else DW_POINTERS
