"""Both halves of a mixture of SwiGLU experts in Triton; see `reference` for what they compute.

The first half reads each choice's row where its token is and writes what SwiGLU makes of it: no
sorted copy of the rows. Rows come through pointers, since Hopper's tensor memory accelerator
gathers none; weights come through it.
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
from ..operators import require_float
from ..swiglu.triton import backward_into

# Two sums a tile, one of the gate and one of up: twice the columns would need every register.
POINTERS = Tiling(128, 64, 64, warps=8, stages=3)
SMALL = Tiling(32, 32, 32, warps=4, stages=3)  # what threads load number by number
HOPPER_TMA = Tiling(128, 64, 64, warps=8, stages=4, tma=True)
# Two rows of numbers are held at a time, half as much as SwiGLU's tile.
_TILE, _WIDEST = 2**11, 2**10


def moe_up_swiglu(
    x: Tensor,
    w13: Tensor,
    row_token: Tensor,
    offs: Tensor,
    *,
    save_gate_up: bool = True,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up of each choice's row, and gate and up, or nothing for them.

    Args:
        x: [T, K].
        w13: [E, 2 * I, K].
        row_token: int32 [M], the token of each row.
        offs: int32 [E], where each expert's rows end.
        save_gate_up: also return gate and up.
        tiling: left out: the default of this GPU.
        programs: how many share the tiles; left out: one a multiprocessor.
    """
    require_float(x, w13)
    x, w13, row_token, offs = (each.contiguous() for each in (x, w13, row_token, offs))
    M, K, E, I = len(row_token), x.shape[1], w13.shape[0], w13.shape[1] // 2  # noqa: E741
    # Every row has an expert: all of it is written.
    h = x.new_empty(M, I)
    gate_up = x.new_empty((M, 2 * I) if save_gate_up else (0,))
    if not h.numel():
        return h, gate_up
    tiling = tiling or _tiling(x, w13)
    weights: Any = w13
    if tiling.tma:
        rows = w13.view(E * 2 * I, K)
        weights = TensorDescriptor.from_tensor(rows, [tiling.block_n, tiling.block_k])
    tile_map, n_tiles = list_tiles(offs, M, tiling.block_m)
    tiles = len(tile_map) * triton.cdiv(I, tiling.block_n)
    _moe_up_swiglu[(min(programs or num_programs(tiling), tiles),)](
        x,
        weights,
        h,
        gate_up,
        row_token,
        offs,
        tile_map,
        n_tiles,
        M,
        I,
        K,
        E,
        TMA=tiling.tma,
        EVEN_K=K % tiling.block_k == 0,
        SAVE=save_gate_up,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=GROUP_M,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return h, gate_up


def up_swiglu(
    x: Tensor, w13: Tensor, row_token: Tensor, offs: Tensor, slot: Tensor, keeps: bool
) -> tuple[Tensor, Tensor]:
    """Return `moe_up_swiglu` for the arguments of the operator, whose gradient reads `slot`."""
    return moe_up_swiglu(x, w13, row_token, offs, save_gate_up=keeps)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate and up, side by side; see the reference."""
    out = torch.empty_like(gate_up)
    (gate, up), (grad_gate, grad_up) = gate_up.chunk(2, dim=-1), out.chunk(2, dim=-1)
    backward_into(grad, gate, up, None, grad_gate, grad_up)
    return out


def scale_by_router_weight(
    grad: Tensor, h: Tensor, slot: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both times their choice's weight, and each choice's product of the two."""
    require_float(grad, h, weight)
    grad, h, slot, weight = (each.contiguous() for each in (grad, h, slot, weight))
    weighted_grad, weighted_h = torch.empty_like(grad), torch.empty_like(h)
    grad_weight = torch.empty_like(weight)
    I, choices = h.shape[1], slot.numel()  # noqa: E741
    block = min(_WIDEST, max(16, triton.next_power_of_2(I)))
    rows = _TILE // block
    if choices:
        _scale_by_router_weight[(triton.cdiv(choices, rows),)](
            grad,
            h,
            slot,
            weight,
            weighted_grad,
            weighted_h,
            grad_weight,
            choices,
            I,
            ROWS=rows,
            BLOCK=block,
        )
    return weighted_grad, weighted_h, grad_weight


def _tiling(x: Tensor, w13: Tensor) -> Tiling:
    # Products of fp32 stay exact: no work for tensor cores, which would round them.
    if x.dtype == torch.float32 or not are_aligned(x, w13):
        return SMALL
    return HOPPER_TMA if current_arch() == HOPPER else POINTERS


@triton.jit(do_not_specialize=["M"])
def _moe_up_swiglu(
    x_ptr,
    w,
    h_ptr,
    gate_up_ptr,
    row_token_ptr,
    offs_ptr,
    tile_map_ptr,
    n_tiles_ptr,
    M,
    I,  # noqa: E741
    K,
    E,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.load(n_tiles_ptr)
    tiles_n = tl.cdiv(I, BLOCK_N)
    tile = take_tile(n_tiles_ptr + 1)
    while tile < tiles_m * tiles_n:
        expert, row, end, column = find_tile(
            tile, tiles_m, tiles_n, tile_map_ptr, offs_ptr, M, E, BLOCK_M, GROUP_M
        )
        rm = row + tl.arange(0, BLOCK_M)
        rn = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rk = tl.arange(0, BLOCK_K)
        live = rm < end
        # Rows are gathered where they are used: no sorted copy of x.
        token = tl.load(row_token_ptr + rm, mask=live, other=0).to(tl.int64)
        a_ptrs = x_ptr + token[:, None] * K + rk[None, :]
        first = expert * 2 * I + column * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Rows behind the last group have no weight.
        for k in range(tl.where(expert < E, tl.cdiv(K, BLOCK_K), 0)):
            a_mask, b_mask = live[:, None], (rn < I)[None, :]
            if not EVEN_K:
                a_mask = a_mask & (rk < K - k * BLOCK_K)[None, :]
                b_mask = b_mask & (rk < K - k * BLOCK_K)[:, None]
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            # One descriptor has both halves; up starts I rows below gate.
            if TMA:
                gate_w = w.load([first, k * BLOCK_K]).T
                up_w = w.load([first + I, k * BLOCK_K]).T
            else:
                rows = expert.to(tl.int64) * 2 * I + rn
                b_ptrs = w + rows[None, :] * K + (k * BLOCK_K + rk)[:, None]
                gate_w = tl.load(b_ptrs, mask=b_mask, other=0.0)
                up_w = tl.load(b_ptrs + tl.cast(I, tl.int64) * K, mask=b_mask, other=0.0)
            # ieee: fp32 rows stay exact; for bf16 it says nothing.
            gate = tl.dot(a, gate_w, gate, input_precision="ieee")
            up = tl.dot(a, up_w, up, input_precision="ieee")
            a_ptrs += BLOCK_K
        tile = take_tile(n_tiles_ptr + 1)
        mask = live[:, None] & (rn < I)[None, :]
        wide = rm.to(tl.int64)[:, None]
        # Gate and up are rounded only where they are saved: SwiGLU takes them in fp32.
        dtype = h_ptr.dtype.element_ty
        if SAVE:
            gate_up_ptrs = gate_up_ptr + wide * 2 * I + rn[None, :]
            tl.store(gate_up_ptrs, gate.to(dtype), mask=mask)
            tl.store(gate_up_ptrs + I, up.to(dtype), mask=mask)
        h = gate * tl.sigmoid(gate) * up
        tl.store(h_ptr + wide * I + rn[None, :], h.to(dtype), mask=mask)


@triton.jit
def _scale_by_router_weight(
    grad_ptr,
    h_ptr,
    slot_ptr,
    weight_ptr,
    weighted_grad_ptr,
    weighted_h_ptr,
    grad_weight_ptr,
    choices,
    I,  # noqa: E741
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    choice = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = choice < choices
    row = tl.load(slot_ptr + choice, mask=live, other=0).to(tl.int64)
    weight = tl.load(weight_ptr + choice, mask=live, other=0.0).to(tl.float32)[:, None]
    dots = tl.zeros((ROWS,), tl.float32)
    for first in range(0, I, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (column < I)[None, :]
        offset = row[:, None] * I + column[None, :]
        grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        # The gradient of the weight, from what is read anyway (arXiv:2512.14080, section 4).
        dots += tl.sum(grad * h, axis=1)
        dtype = h_ptr.dtype.element_ty
        tl.store(weighted_grad_ptr + offset, (grad * weight).to(dtype), mask=mask)
        tl.store(weighted_h_ptr + offset, (h * weight).to(dtype), mask=mask)
    dots = dots.to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + choice, dots, mask=live)
