"""Quantisation and dequantisation in one pass each: the same bits as the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import require_float
from .reference import BLOCK, LARGEST, LEAST, Layout, check_layout, check_width

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)


def quant_act(x: Tensor, pow2: bool = False, layout: Layout = "row") -> list[Tensor]:
    """Return activations in e4m3, and their scales; see the reference."""
    require_float(x)
    check_layout(layout)
    M, K = x.shape
    check_width(K)
    is_row, is_column = layout != "column", layout != "row"
    rows = _empty(x, is_row, (M, K), (K // BLOCK, M))
    columns = _empty(x, is_column, (K, M), (triton.cdiv(M, BLOCK), K))
    # Scales of columns need whole blocks of rows; without them smaller tiles keep more in flight.
    tile, warps = (BLOCK, 8) if is_column else (32, 4)
    # A grid of no programs cannot be launched.
    if M:
        _quant_act[(triton.cdiv(M, tile), K // BLOCK)](
            x.contiguous(),
            *rows,
            *columns,
            M,
            K,
            IS_ROW=is_row,
            IS_COLUMN=is_column,
            POW2=pow2,
            ROWS=tile,
            BLOCK=BLOCK,
            num_warps=warps,
        )
    return [*rows * is_row, *columns * is_column]


def quant_weight(w: Tensor, pow2: bool = False, layout: Layout = "row") -> list[Tensor]:
    """Return weights in e4m3 with a scale for each 128 x 128 of them; see the reference."""
    require_float(w)
    check_layout(layout)
    E, N, K = w.shape
    is_row, is_column = layout != "column", layout != "row"
    blocks_n, blocks_k = triton.cdiv(N, BLOCK), triton.cdiv(K, BLOCK)
    rows = _empty(w, is_row, (E, N, K), (E, blocks_n, blocks_k))
    columns = _empty(w, is_column, (E, K, N), (E, blocks_k, blocks_n))
    if w.numel():
        _quant_weight[(blocks_k, blocks_n, E)](
            w.contiguous(),
            *rows,
            *columns,
            N,
            K,
            IS_ROW=is_row,
            IS_COLUMN=is_column,
            POW2=pow2,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return [*rows * is_row, *columns * is_column]


def dequant(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q times the scale of each 128 x 128 block; see the reference."""
    M, N = q.shape
    out = torch.empty(M, N, dtype=dtype, device=q.device)
    require_float(out)
    if q.numel():
        grid = triton.cdiv(N, BLOCK), triton.cdiv(M, BLOCK)
        _dequant[grid](q.contiguous(), scale.contiguous(), out, M, N, BLOCK=BLOCK, num_warps=8)
    return out


def _empty(
    like: Tensor, is_wanted: bool, values: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty(values if is_wanted else (0,), dtype=torch.float8_e4m3fn),
        like.new_empty(scales if is_wanted else (0,), dtype=torch.float32),
    )


@triton.jit
def _magnitude(x):
    """Return |x|, and 0 for NaN, which stays what it is and does not take its block with it."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def _scale(largest, POW2: tl.constexpr):
    scale = tl.div_rn(tl.maximum(largest, _LEAST), _LARGEST)
    if POW2:
        # The next exponent, unless all bits below it are 0.
        bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
        scale = (bits & -0x800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _quantised(x, scale):
    """Return x over its scale in e4m3; what is out of range is clamped, and NaN stays NaN."""
    # div_rn rounds as IEEE says; a plain division is an approximation on GPUs.
    scaled = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # NaN must come out as NaN, as from the reference; a plain minimum drops it.
    scaled = tl.minimum(scaled, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.maximum(scaled, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)


@triton.jit
def _quant_act(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    M,
    K,
    IS_ROW: tl.constexpr,
    IS_COLUMN: tl.constexpr,
    POW2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    # Columns need no mask: K is a multiple of the block.
    live = row < M
    offset = row[:, None] * K + column[None, :]
    x = tl.load(x_ptr + offset, mask=live[:, None], other=0.0).to(tl.float32)
    size = _magnitude(x)
    if IS_ROW:
        scale = _scale(tl.max(size, axis=1, keep_dims=True), POW2)
        tl.store(row_ptr + offset, _quantised(x, scale), mask=live[:, None])
        # Scales of a block are neighbours along M: the product reads them as columns.
        tl.store(row_scale_ptr + block * M + row[:, None], scale, mask=live[:, None])
    if IS_COLUMN:
        # The same tile serves both layouts: x is read once.
        scale = _scale(tl.max(size, axis=0, keep_dims=True), POW2)
        offset = column[:, None] * M + row[None, :]
        tl.store(column_ptr + offset, tl.trans(_quantised(x, scale)), mask=live[None, :])
        first = tl.program_id(0).to(tl.int64) * K
        tl.store(column_scale_ptr + first + column[None, :], scale)


@triton.jit
def _quant_weight(
    w_ptr,
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    N,
    K,
    IS_ROW: tl.constexpr,
    IS_COLUMN: tl.constexpr,
    POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_k, block_n, e = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # int64: an expert's weights start beyond 2^31 numbers in large layers.
    n = block_n.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = block_k.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = e.to(tl.int64) * N * K
    mask = (n < N)[:, None] & (k < K)[None, :]
    offset = expert + n[:, None] * K + k[None, :]
    w = tl.load(w_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = _scale(
        tl.max(tl.max(_magnitude(w), axis=1, keep_dims=True), axis=0, keep_dims=True), POW2
    )
    q = _quantised(w, scale)
    blocks_n, blocks_k = tl.num_programs(1), tl.num_programs(0)
    # The scale is a block of one number, so its address is one too.
    only = tl.zeros((1, 1), tl.int32)
    if IS_ROW:
        tl.store(row_ptr + offset, q, mask=mask)
        tl.store(row_scale_ptr + (e * blocks_n + block_n) * blocks_k + block_k + only, scale)
    if IS_COLUMN:
        offset = expert + k[:, None] * N + n[None, :]
        tl.store(column_ptr + offset, tl.trans(q), mask=tl.trans(mask))
        tl.store(column_scale_ptr + (e * blocks_k + block_k) * blocks_n + block_n + only, scale)


@triton.jit
def _dequant(q_ptr, scale_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    block_n, block_m = tl.program_id(0), tl.program_id(1)
    m = block_m.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = block_n * BLOCK + tl.arange(0, BLOCK)
    mask = (m < M)[:, None] & (n < N)[None, :]
    offset = m[:, None] * N + n[None, :]
    q = tl.load(q_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    # fp32, rounded once to the dtype of the result.
    out = q * tl.load(scale_ptr + block_m * tl.num_programs(0) + block_n)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)
