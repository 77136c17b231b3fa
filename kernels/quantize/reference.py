"""Quantisation to fp8 by blocks (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2).

A block is divided by its largest magnitude over 448, the largest e4m3. What does the dividing is
the scale's reciprocal, rounded to fp32, so that every implementation gives the same bits.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
LARGEST = 448.0
LEAST = 1e-12
"""The magnitude that a block of zeros is taken to have."""

Layout = Literal["row", "column", "both"]


def quant_act(x: Tensor, *, pow2: bool = False, layout: Layout = "row") -> tuple[Tensor, ...]:
    """Return activations in e4m3, and their scales: what to multiply by to have them back.

    Args:
        x: [M, K], K a multiple of 128.
        pow2: round scales up to powers of two, whose products are exact.
        layout: "row": a scale for each 128 values of a row, for products over K. "column": the
            same of the transposed x, for products over M. "both": first one, then the other.

    Returns:
        For "row" [M, K] and fp32 scales [K / 128, M]; for "column" [K, M] and [ceil(M / 128), K].
    """
    check_layout(layout)
    check_width(x.shape[1])
    out: tuple[Tensor, ...] = ()
    if layout != "column":
        out += _by_rows(x, pow2)
    if layout != "row":
        out += _by_rows(x.T, pow2)
    return out


def quant_weight(w: Tensor, *, pow2: bool = False, layout: Layout = "row") -> tuple[Tensor, ...]:
    """Return weights in e4m3 with a scale for each 128 x 128 of them.

    Args:
        w: [E, N, K].
        pow2: see `quant_act`.
        layout: "column" transposes each matrix; "both" is first as it stands, then transposed.

    Returns:
        For "row" [E, N, K] and fp32 scales [E, ceil(N / 128), ceil(K / 128)], and for "column"
        both with N and K changed.
    """
    check_layout(layout)
    E, N, K = w.shape
    padded = F.pad(w, (0, -K % BLOCK, 0, -N % BLOCK))
    blocks = padded.view(E, -(-N // BLOCK), BLOCK, -(-K // BLOCK), BLOCK)
    scale = _scale(blocks, (2, 4), pow2)
    q = _quantised(blocks, scale).flatten(3, 4).flatten(1, 2)[:, :N, :K].contiguous()
    scale = scale.squeeze(4).squeeze(2)
    rows = torch.contiguous_format
    as_it_is = q, scale
    transposed = q.mT.clone(memory_format=rows), scale.mT.clone(memory_format=rows)
    return {"row": as_it_is, "column": transposed, "both": as_it_is + transposed}[layout]


def dequant(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q times the scale of each 128 x 128 block, rounded once.

    Args:
        q: [M, N].
        scale: [ceil(M / 128), ceil(N / 128)].
        dtype: of the result.
    """
    M, N = q.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:M].repeat_interleave(BLOCK, 1)[:, :N]
    return (q.float() * wide).to(dtype)


def dequant_act(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [M, K] from what `quant_act` makes of rows."""
    return (q.float() * scale.T.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]).to(dtype)


def check_layout(layout: str) -> None:
    """Refuse a word that names no layout.

    Raises:
        ValueError: it is none.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"no layout is named {layout!r}; known: {', '.join(get_args(Layout))}")


def check_width(K: int) -> None:
    """Refuse rows that blocks do not fill.

    Raises:
        ValueError: the width is no multiple of 128.
    """
    if K % BLOCK:
        raise ValueError(f"rows of {K} values are no multiple of {BLOCK}")


def _by_rows(x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    # Zeros do not change a block's largest magnitude.
    blocks = F.pad(x, (0, -K % BLOCK)).view(M, -(-K // BLOCK), BLOCK)
    scale = _scale(blocks, (2,), pow2)
    q = _quantised(blocks, scale).flatten(1)[:, :K].contiguous()
    return q, scale.squeeze(2).T.contiguous()


def _scale(blocks: Tensor, dims: tuple[int, ...], pow2: bool) -> Tensor:
    # NaN stays what it is, and does not take its block with it.
    size = blocks.float().abs().nan_to_num(0.0, float("inf"))
    largest = size.amax(dims, keepdim=True).clamp(min=LEAST)
    # By a tensor of the same device: CUDA multiplies by the rounded reciprocal of a number.
    scale = largest / torch.full_like(largest, LARGEST)
    if pow2:
        # The next exponent, unless all bits below it are 0.
        bits = scale.view(torch.int32) + 0x7FFFFF
        scale = (bits & -0x800000).view(torch.float32)
    return scale


def _quantised(blocks: Tensor, scale: Tensor) -> Tensor:
    # Times the rounded reciprocal and not divided: Triton's kernel then gives the same bits.
    scaled = blocks.float() * scale.reciprocal()
    # Clamp first: a cast of more than 448 gave NaN before torch 2.13.
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
