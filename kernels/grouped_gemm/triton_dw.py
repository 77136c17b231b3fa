"""The weight gradient of the grouped product in Triton; see `reference` for what it computes.

A program sums all rows of a group for one tile of its weight, in order and in fp32: no atomics, so
that results repeat bit for bit. A group without rows gets zeros. In the kernel for the tensor
memory accelerator, rows outside of the group read as 0 (see `triton`, ragged descriptors).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from .launch import Tiling, dw_tiling
from .triton_tiles import current_arch, num_programs, take_tile


@triton.jit
def _dw_kernel(
    dy,
    x,
    dw_ptr,
    offs_ptr,
    counter_ptr,
    N,
    K,
    E,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Read dy and x through ragged descriptors (TMA) or pointers."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile = take_tile(counter_ptr)
    while tile < E * tiles_n * tiles_k:
        expert = tile // (tiles_n * tiles_k)
        n = tile // tiles_k % tiles_n * BLOCK_N
        k = tile % tiles_k * BLOCK_K
        rn = n + tl.arange(0, BLOCK_N)
        rk = k + tl.arange(0, BLOCK_K)
        start = tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offs_ptr + expert)
        # Neither split nor atomic: a group's rows are summed by one program in their order.
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for row in range(start, end, BLOCK_M):
            # The ragged descriptor has its edge at the end of the group: rows after it read as 0.
            if TMA:
                far: tl.constexpr = 0x40000000
                g = dy.load([far, end, far - end + row, n])
                g = tl.reshape(g, (BLOCK_M, BLOCK_N)).T
                rows = tl.reshape(x.load([far, end, far - end + row, k]), (BLOCK_M, BLOCK_K))
            else:
                rm = row + tl.arange(0, BLOCK_M)
                g_ptrs = dy + rm[None, :].to(tl.int64) * N + rn[:, None]
                x_ptrs = x + rm[:, None].to(tl.int64) * K + rk[None, :]
                g = tl.load(g_ptrs, mask=(rm < end)[None, :] & (rn < N)[:, None], other=0.0)
                rows = tl.load(x_ptrs, mask=(rm < end)[:, None] & (rk < K)[None, :], other=0.0)
            total = tl.dot(g, rows, total, input_precision="ieee")
        tile = take_tile(counter_ptr)
        dw_ptrs = dw_ptr + expert.to(tl.int64) * N * K
        dw_ptrs += rn[:, None].to(tl.int64) * K + rk[None, :]
        mask = (rn < N)[:, None] & (rk < K)[None, :]
        # Read and written by one program, in fp32: accumulation over micro batches stays exact to a
        # rounding.
        if ADD:
            total += tl.load(dw_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dw_ptrs, total.to(dw_ptr.dtype.element_ty), mask=mask)


def grouped_dw(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> Tensor:
    """Return dy.T @ x of each group's rows; see `reference.grouped_dw`."""
    dw = torch.empty((len(offs), dy.shape[1], x.shape[1]), dtype=out_dtype, device=x.device)
    _launch(dw, dy, x, offs, False, tiling, programs)
    return dw


def add_grouped_dw(
    total: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    *,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Add the products to a gradient; see `reference.add_grouped_dw`.

    Raises:
        ValueError: the gradient is not contiguous.
    """
    if not total.is_contiguous():
        raise ValueError(f"the gradient has strides {total.stride()}; make it contiguous")
    _launch(total, dy, x, offs, True, tiling, programs)


def _launch(
    dw: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    add: bool,
    tiling: Tiling | None,
    programs: int | None,
) -> None:
    if not dw.numel():
        return
    dy, x, offs = dy.contiguous(), x.contiguous(), offs.contiguous()
    E, N, K = dw.shape
    tiling = tiling or dw_tiling(current_arch(), dy, x)
    # A descriptor of no rows is refused.
    tma = tiling.tma and len(x) > 0
    operands: tuple[Any, Any] = (dy, x)
    if tma:
        operands = (
            create_ragged_descriptor(dy, [tiling.block_m, tiling.block_n]),
            create_ragged_descriptor(x, [tiling.block_m, tiling.block_k]),
        )
    tiles = E * triton.cdiv(N, tiling.block_n) * triton.cdiv(K, tiling.block_k)
    _dw_kernel[(min(programs or num_programs(tiling), tiles),)](
        *operands,
        dw,
        offs,
        offs.new_zeros(1),
        N,
        K,
        E,
        ADD=add,
        TMA=tma,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
