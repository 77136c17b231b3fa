"""Quantisation as operators: the reference on CPUs, Triton on GPUs, known to compile.

Nothing here has a gradient: what multiplies in fp8 says how to differentiate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import operator
from . import reference
from .reference import BLOCK, Layout


def quant_act(x: Tensor, *, pow2: bool = False, layout: Layout = "row") -> tuple[Tensor, ...]:
    """Return activations in e4m3, and their scales; see the reference."""
    return tuple(_quant_act(x, pow2, layout))


def quant_weight(w: Tensor, *, pow2: bool = False, layout: Layout = "row") -> tuple[Tensor, ...]:
    """Return weights in e4m3 with a scale for each 128 x 128 of them; see the reference."""
    return tuple(_quant_weight(w, pow2, layout))


@operator("quant_act", cuda="quantize.triton:quant_act")
def _quant_act(x: Tensor, pow2: bool, layout: str) -> list[Tensor]:
    return list(reference.quant_act(x, pow2=pow2, layout=layout))  # type: ignore[arg-type]


@_quant_act.register_fake
def _(x: Tensor, pow2: bool, layout: str) -> list[Tensor]:
    M, K = x.shape
    rows = [_values(x, M, K), _scales(x, K // BLOCK, M)]
    columns = [_values(x, K, M), _scales(x, -(-M // BLOCK), K)]
    return {"row": rows, "column": columns, "both": rows + columns}[layout]


@operator("quant_weight", cuda="quantize.triton:quant_weight")
def _quant_weight(w: Tensor, pow2: bool, layout: str) -> list[Tensor]:
    return list(reference.quant_weight(w, pow2=pow2, layout=layout))  # type: ignore[arg-type]


@_quant_weight.register_fake
def _(w: Tensor, pow2: bool, layout: str) -> list[Tensor]:
    E, N, K = w.shape
    blocks_n, blocks_k = -(-N // BLOCK), -(-K // BLOCK)
    rows = [_values(w, E, N, K), _scales(w, E, blocks_n, blocks_k)]
    columns = [_values(w, E, K, N), _scales(w, E, blocks_k, blocks_n)]
    return {"row": rows, "column": columns, "both": rows + columns}[layout]


@operator(
    "dequant",
    cuda="quantize.triton:dequant",
    fake=lambda q, scale, dtype: q.new_empty(q.shape, dtype=dtype),
)
def dequant(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q times the scale of each 128 x 128 block; see the reference."""
    return reference.dequant(q, scale, dtype)


def _values(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float8_e4m3fn)


def _scales(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
