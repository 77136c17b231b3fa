"""The grouped product in Triton; see `reference` for what it computes.

Programs share the tiles of all groups: a small kernel lists them, so that the host need not know
how many rows a group has. Rows behind the last group are a group of their own, without a weight.

Two kernels: one reads through pointers, the other through the tensor memory accelerator of Hopper.
That one writes through a ragged descriptor: its two further dimensions move the end of a group to
the edge of the tensor, so that hardware drops what lies behind (triton.tools.ragged_tma).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Tiling, mm_tiling
from .triton_tiles import GROUP_M, current_arch, find_tile, list_tiles, num_programs, take_tile


@triton.jit(do_not_specialize=["M"])
def _pointers_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    offs_ptr,
    tile_map_ptr,
    n_tiles_ptr,
    M,
    N,
    K,
    E,
    TRANS_W: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Persistent programs: the number of tiles is known on the device alone.
    tiles_m = tl.load(n_tiles_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = take_tile(n_tiles_ptr + 1)
    while tile < tiles_m * tiles_n:
        expert, row, end, column = find_tile(
            tile, tiles_m, tiles_n, tile_map_ptr, offs_ptr, M, E, BLOCK_M, GROUP_M
        )
        rm = row + tl.arange(0, BLOCK_M)
        rn = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rk = tl.arange(0, BLOCK_K)
        # int64: rows times K passes 2^31 for long batches.
        a_ptrs = x_ptr + rm[:, None].to(tl.int64) * K + rk[None, :]
        b_ptrs = w_ptr + expert.to(tl.int64) * N * K
        if TRANS_W:
            b_ptrs += rn[None, :].to(tl.int64) * K + rk[:, None]
            b_step = BLOCK_K
        else:
            b_ptrs += rk[:, None].to(tl.int64) * N + rn[None, :]
            b_step = BLOCK_K * N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, tl.where(expert < E, tl.cdiv(K, BLOCK_K), 0)):
            a_mask, b_mask = (rm < end)[:, None], (rn < N)[None, :]
            # Masks along K cost registers: only where a step can reach over the end.
            if not EVEN_K:
                a_mask = a_mask & (rk < K - k * BLOCK_K)[None, :]
                b_mask = b_mask & (rk < K - k * BLOCK_K)[:, None]
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            b = tl.load(b_ptrs, mask=b_mask, other=0.0)
            # ieee: TF32 would round fp32 operands to 10 bits.
            total = tl.dot(a, b, total, input_precision="ieee")
            a_ptrs += BLOCK_K
            b_ptrs += b_step
        # Asked for while this tile is stored, which hides the time that the answer takes.
        tile = take_tile(n_tiles_ptr + 1)
        y_ptrs = y_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
        y_mask = (rm < end)[:, None] & (rn < N)[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit
def _store_rows(y, row, end, column, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile whose rows from `end` on belong to others."""
    far: tl.constexpr = 0x40000000  # as many rows as a ragged descriptor pretends to have
    y.store([far, end, far - end + row, column], tl.reshape(value, (1, 1, ROWS, COLUMNS)))


@triton.jit
def _tma_sum(
    x,
    w,
    expert,
    row,
    n,
    N,
    K,
    E,
    TRANS_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of a tile, read through descriptors; 0 without an expert."""
    # Experts lie below each other: one descriptor serves all.
    w_row = expert * (N if TRANS_W else K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.where(expert < E, tl.cdiv(K, BLOCK_K), 0)):
        a = x.load([row, k * BLOCK_K])
        if TRANS_W:
            b = w.load([w_row + n, k * BLOCK_K]).T
        else:
            b = w.load([w_row + k * BLOCK_K, n])
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    x,
    w,
    y,
    offs_ptr,
    tile_map_ptr,
    n_tiles_ptr,
    M,
    N,
    K,
    E,
    TRANS_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Take x, w and y as descriptors."""
    tiles_m = tl.load(n_tiles_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    tile = take_tile(n_tiles_ptr + 1)
    while tile < tiles:
        expert, row, end, column = find_tile(
            tile, tiles_m, tiles_n, tile_map_ptr, offs_ptr, M, E, BLOCK_M, GROUP_M
        )
        n = column * BLOCK_N
        total = _tma_sum(x, w, expert, row, n, N, K, E, TRANS_W, BLOCK_M, BLOCK_N, BLOCK_K)
        tile = take_tile(n_tiles_ptr + 1)
        if HALVES:
            half: tl.constexpr = BLOCK_N // 2
            # Stored in two halves, through a buffer of half the size: a further stage of loads
            # then fits into shared memory.
            pairs = tl.permute(tl.reshape(total, (BLOCK_M, 2, half)), (0, 2, 1))
            left, right = tl.split(pairs)
            _store_rows(y, row, end, n, left.to(y.dtype), BLOCK_M, half)
            _store_rows(y, row, end, n + half, right.to(y.dtype), BLOCK_M, half)
        else:
            _store_rows(y, row, end, n, total.to(y.dtype), BLOCK_M, BLOCK_N)


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    trans_w: bool = True,
    out_dtype: torch.dtype | None = None,
    *,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> Tensor:
    """Return each row times the weight of its group; see `reference.grouped_mm`.

    Args:
        x: [M, K].
        w: [E, N, K] if trans_w, else [E, K, N].
        offs: int32 [E].
        trans_w: whether a weight is transposed.
        out_dtype: of the result; left out: that of x.
        tiling: left out: the default of this GPU.
        programs: how many share the tiles; left out: as many as run at once.

    Raises:
        ValueError: with this tiling a tile of one weight would reach into the next.
    """
    # Addresses are computed from the shape.
    x, w, offs = x.contiguous(), w.contiguous(), offs.contiguous()
    M, K = x.shape
    E, N = w.shape[0], w.shape[1 if trans_w else 2]
    y = torch.empty((M, N), dtype=out_dtype or x.dtype, device=x.device)
    if not y.numel():
        return y
    tiling = tiling or mm_tiling(current_arch(), x, w, y, trans_w=trans_w)
    if tiling.tma and not trans_w and K % tiling.block_k:
        raise ValueError(
            f"weights of {K} rows in tiles of {tiling.block_k}: take a tiling without tma"
        )
    tile_map, n_tiles = list_tiles(offs, M, tiling.block_m)
    tiles = len(tile_map) * triton.cdiv(N, tiling.block_n)
    grid = (min(programs or num_programs(tiling), tiles),)
    lists, sizes = (offs, tile_map, n_tiles), (M, N, K, E)
    options = {
        "TRANS_W": trans_w,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "GROUP_M": GROUP_M,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    if tiling.tma:
        operands = _descriptors(x, w, y, trans_w, tiling)
        _tma_kernel[grid](*operands, *lists, *sizes, HALVES=tiling.halves, **options)
    else:
        _pointers_kernel[grid](x, w, y, *lists, *sizes, EVEN_K=K % tiling.block_k == 0, **options)
    return y


def _descriptors(x: Tensor, w: Tensor, y: Tensor, trans_w: bool, tiling: Tiling) -> tuple[Any, ...]:
    """Return what the tensor memory accelerator needs to know of x, w and y."""
    weight = [tiling.block_n, tiling.block_k] if trans_w else [tiling.block_k, tiling.block_n]
    columns = tiling.block_n // 2 if tiling.halves else tiling.block_n
    return (
        TensorDescriptor.from_tensor(x, [tiling.block_m, tiling.block_k]),
        TensorDescriptor.from_tensor(w.flatten(0, 1), weight),
        create_ragged_descriptor(y, [tiling.block_m, columns]),
    )
