"""Rotary position embedding in one pass; see the reference for the formula."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import require_float

# Pairs a program: 16 a thread with four warps.
_TILE = 2**11


def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return x [B, S, H, K] turned by its positions' angles, or by the negative ones."""
    require_float(x, cos, sin)
    B, S, H, K = x.shape
    x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
    # Angles that all rows share get a row stride of 0: nothing is copied.
    cos, sin = (each.expand(B, S, 1, K // 2) for each in (cos, sin))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(K // 2)
    heads = max(1, min(triton.next_power_of_2(H), _TILE // block))
    if out.numel():
        _rotary[(B * S, triton.cdiv(H, heads))](
            x,
            cos,
            sin,
            out,
            # Strides, since queries and keys are parts of a wider product.
            *x.stride()[:3],
            *cos.stride()[:2],
            *sin.stride()[:2],
            S,
            H,
            K // 2,
            INVERSE=inverse,
            HEADS=heads,
            BLOCK=block,
        )
    return out


@triton.jit
def _rotary(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_row,
    x_position,
    x_head,
    cos_row,
    cos_position,
    sin_row,
    sin_position,
    S,
    H,
    HALF,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, position = token // S, token % S
    pair = tl.arange(0, BLOCK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angles = pair < HALF
    cos = tl.load(cos_ptr + row * cos_row + position * cos_position + pair, mask=angles, other=0.0)
    sin = tl.load(sin_ptr + row * sin_row + position * sin_position + pair, mask=angles, other=0.0)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    # The backward pass: the transpose of a rotation.
    if INVERSE:
        sin = -sin
    mask = (head < H)[:, None] & angles[None, :]
    source = x_ptr + row * x_row + position * x_position
    source += head.to(tl.int64)[:, None] * x_head + pair[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    # The result is contiguous, whatever the strides of x.
    target = out_ptr + (token * H + head[:, None]) * (2 * HALF) + pair[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(dtype), mask=mask)
