"""Moments in fewer bits than their weights: in bf16, or in 8 bits with a scale for each block.

The 8 bits are those of dynamic block-wise quantization (Dettmers et al. 2022, arXiv:2110.02861,
section 2): a block of a row is divided by the largest absolute value in the block, and each element
becomes the index of the nearest of 256 values. Rows are never in one block with other rows, and a
block is equally long under every plan, so that any plan reads what another one has saved.
"""

from __future__ import annotations

from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...core.local import SCALE, is_split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BLOCK, LEAST_BLOCK = 256, 64
"""elements of a block; rows that only shorter blocks than the least divide keep their dtype"""
LEAST_SCALE = 1e-12
"""scale of a block of zeros, by which the block is divided"""
DECADES = 7


def dynamic_values(is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values between -1 or 0 and 1 that 8 bits stand for, in fp32 and in order.

    Each of seven decades below 1 has twice as many values as the decade below; these are the
    middles of equal parts of the decade.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        parts = 2**decade if is_signed else 2 ** (decade + 1)
        for part in range(parts):
            middle = 10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (part + 0.5) / parts)
            values += [middle, -middle] if is_signed else [middle]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


_dynamic_values = cache(dynamic_values)


def _values_for(key: str, tensor: Tensor) -> Tensor:
    """Return the values of a moment's codes, on the device of a tensor."""
    is_signed = not key.endswith("_sq")
    # Tensors of a simulation have no content: real steps must not find theirs.
    make = _dynamic_values if type(tensor) is Tensor else dynamic_values
    return make(is_signed, tensor.device)


def block_size(columns: int, ndim: int) -> int:
    """Return the elements of a block in rows of so many; 0: the tensor keeps the weight's dtype."""
    size = gcd(columns, BLOCK)
    return size if ndim > 1 and size >= LEAST_BLOCK else 0


def splits_a_block(weight: Tensor) -> bool:
    """Return whether ranks divide the rows of a weight elsewhere than between blocks."""
    if not is_split(weight):
        return False
    placed = cast("DTensor", weight)
    last = weight.ndim - 1
    pairs = zip(placed.device_mesh.shape, placed.placements, strict=True)
    ranks = prod(size for size, placement in pairs if placement.is_shard(last))
    size = block_size(weight.shape[-1], weight.ndim) if weight.ndim else 0
    return size > 0 and ranks > 1 and weight.shape[-1] % (ranks * size) != 0


def new_moment(weight: Tensor, key: str, dtype: str) -> dict[str, Tensor]:
    """Return the tensors of a moment that is zero, by their keys in the optimizer's state.

    Args:
        weight: this rank's part of the weight.
        key: the name of the moment.
        dtype: "fp32" (that of the weight), "bf16" or "int8".
    """
    if dtype == "bf16":
        return {key: torch.zeros_like(weight, dtype=torch.bfloat16)}
    size = block_size(weight.shape[-1], weight.ndim) if dtype == "int8" and weight.ndim else 0
    if not size:
        return {key: torch.zeros_like(weight)}
    blocks = (*weight.shape[:-1], weight.shape[-1] // size)
    return {
        key: torch.zeros_like(weight, dtype=torch.uint8),
        key + SCALE: torch.zeros(blocks, dtype=torch.float32, device=weight.device),
    }


def read_moment(state: dict[str, Any], key: str, dtype: torch.dtype) -> Tensor:
    """Return a moment in a dtype: the tensor of the state itself, if it has the dtype."""
    stored: Tensor = state[key]
    scales: Tensor | None = state.get(key + SCALE)
    if scales is None:
        return stored.to(dtype)
    values = _values_for(key, stored)[stored.long()]
    return (_by_block(values, scales) * scales.unsqueeze(-1)).view(stored.shape).to(dtype)


def write_moment(state: dict[str, Any], key: str, moment: Tensor) -> None:
    """Round a moment into the tensors of the state."""
    scales: Tensor | None = state.get(key + SCALE)
    if scales is None:
        state[key].copy_(moment)
        return
    blocks = _by_block(moment.float(), scales)
    torch.amax(blocks.abs(), -1, out=scales)
    scales.clamp_(min=LEAST_SCALE)
    values = _values_for(key, moment)
    middles = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(blocks / scales.unsqueeze(-1), middles, right=True)
    state[key].copy_(codes.view(moment.shape))


def _by_block(values: Tensor, scales: Tensor) -> Tensor:
    """Return the values with a dim of blocks and one of the elements of a block at the end."""
    return values.reshape(*scales.shape, values.numel() // max(1, scales.numel()))
