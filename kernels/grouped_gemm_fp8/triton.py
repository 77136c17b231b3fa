"""The grouped product in fp8 in Triton; see `reference` for what it computes.

Tensor cores sum fp8 products in less than fp32. So each step of 128 is a product of its own, which
is scaled and added to the sum in fp32 (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..grouped_gemm.launch import HOPPER, Tiling, are_aligned
from ..grouped_gemm.triton_tiles import (
    GROUP_M,
    current_arch,
    find_tile,
    list_tiles,
    num_programs,
    take_tile,
)
from ..quantize.reference import BLOCK
from .reference import check_shapes

# A tile is one block of scales wide: each step has one scale of the weight.
POINTERS = Tiling(64, BLOCK, BLOCK, warps=4, stages=4, per_processor=2)
HOPPER_TMA = Tiling(128, BLOCK, BLOCK, warps=8, stages=4, tma=True)


def grouped_mm_fp8(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> Tensor:
    """Return each row times the weight of its group; see `reference.grouped_mm_fp8`.

    Args:
        x: e4m3 [M, K].
        x_scale: [K / 128, M].
        w: e4m3 [E, N, K].
        w_scale: [E, N / 128, K / 128].
        offs: int32 [E].
        out_dtype: of the result.
        tiling: left out: the default of this GPU.
        programs: how many share the tiles; left out: one a multiprocessor.
    """
    check_shapes(x, w)
    x, x_scale, w, w_scale, offs = (e.contiguous() for e in (x, x_scale, w, w_scale, offs))
    (M, K), (E, N, _) = x.shape, w.shape
    y = torch.empty((M, N), dtype=out_dtype, device=x.device)
    if not y.numel():
        return y
    if tiling is None:
        is_tma = current_arch() == HOPPER and are_aligned(x, w)
        tiling = HOPPER_TMA if is_tma else POINTERS
    tile_map, n_tiles = list_tiles(offs, M, tiling.block_m)
    operands: tuple[Any, Any] = (x, w)
    if tiling.tma:
        operands = (
            TensorDescriptor.from_tensor(x, [tiling.block_m, BLOCK]),
            TensorDescriptor.from_tensor(w.view(E * N, K), [BLOCK, BLOCK]),
        )
    _grouped_mm_fp8[(min(programs or num_programs(tiling), len(tile_map) * (N // BLOCK)),)](
        *operands,
        x_scale,
        w_scale,
        y,
        offs,
        tile_map,
        n_tiles,
        M,
        N,
        K,
        E,
        TMA=tiling.tma,
        BLOCK_M=tiling.block_m,
        BLOCK=BLOCK,
        GROUP_M=GROUP_M,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return y


@triton.jit(do_not_specialize=["M"])
def _grouped_mm_fp8(
    x,
    w,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    offs_ptr,
    tile_map_ptr,
    n_tiles_ptr,
    M,
    N,
    K,
    E,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.load(n_tiles_ptr)
    tiles_n, steps = N // BLOCK, K // BLOCK
    tile = take_tile(n_tiles_ptr + 1)
    while tile < tiles_m * tiles_n:
        expert, row, end, column = find_tile(
            tile, tiles_m, tiles_n, tile_map_ptr, offs_ptr, M, E, BLOCK_M, GROUP_M
        )
        rm = row + tl.arange(0, BLOCK_M)
        rn = column * BLOCK + tl.arange(0, BLOCK)
        rk = tl.arange(0, BLOCK)
        live = rm < end
        weight_row = expert.to(tl.int64) * N + column * BLOCK
        x_scale = x_scale_ptr + rm
        w_scale = w_scale_ptr + (expert.to(tl.int64) * tiles_n + column) * steps
        total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
        # Rows behind the last group have no weight.
        for k in range(tl.where(expert < E, steps, 0)):
            if TMA:
                a = x.load([row, k * BLOCK])
                b = w.load([weight_row.to(tl.int32), k * BLOCK]).T
            else:
                a_ptrs = x + rm[:, None].to(tl.int64) * K + (k * BLOCK + rk)[None, :]
                a = tl.load(a_ptrs, mask=live[:, None], other=0.0)
                rows = weight_row + tl.arange(0, BLOCK)
                b = tl.load(w + rows[None, :] * K + (k * BLOCK + rk)[:, None])
            # Both scales of this step of 128.
            scale = tl.load(x_scale, mask=live, other=0.0) * tl.load(w_scale + k)
            total += tl.dot(a, b) * scale[:, None]
            # Scales of the next block of K are the next row.
            x_scale += M
        tile = take_tile(n_tiles_ptr + 1)
        y_ptrs = y_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=live[:, None])
