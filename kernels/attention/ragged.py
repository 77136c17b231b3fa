"""Attention within the samples of a flat row, without computing padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ragged.lengths import SampleBlocks, SampleLengths

Attention = Callable[..., Tensor]
FLASH_MAX_WIDTH = 256


def attend_in_blocks(
    attend: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: SampleLengths,
    *,
    causal: bool = True,
    **limits: Any,
) -> Tensor:
    """Attend in padded blocks of samples of about one length, by any implementation.

    Queries, keys and values are gathered once into the rows of all blocks, and the outputs back.
    Padding stands behind its sample, so that no query of the sample sees it where attention is
    causal; else it is masked.

    Args:
        attend: see `local.attend`, less its first argument; for rows [B, S, H, K].
        query: [1, T, H, K].
        key: [1, T, G, K].
        value: [1, T, G, W].
        lengths: the lengths of the samples.
        causal: see `local.attend`.
        limits: windows, chunks, sinks and softcap; see there.

    Returns:
        [1, T, H, W].
    """
    blocks, flat = lengths.blocks, (query[0], key[0], value[0])
    is_padded = len(blocks.shapes) > 1 or blocks.shapes[0].samples > 1
    if len(blocks.shapes) == 1 and len(blocks.sources) == lengths.total:
        is_padded = False  # all samples have one length, and stand in their order
    if is_padded:
        flat = tuple(_ToBlocks.apply(x, blocks.sources, blocks.slots) for x in flat)  # type: ignore[no-untyped-call]
    sizes = [block.samples * block.width for block in blocks.shapes]
    pieces = zip(*(torch.split(x, sizes) for x in flat), strict=True)
    masks: Sequence[Tensor | None] = [None] * len(sizes)
    if not causal:
        limits["causal"] = False
        masks = _key_masks(blocks) if is_padded else masks
    outs = [
        attend(*(x.view(*block, *x.shape[1:]) for x in rows), mask, **limits).flatten(0, 1)
        for block, rows, mask in zip(blocks.shapes, pieces, masks, strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if is_padded:
        out = _FromBlocks.apply(out, blocks.slots)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0)


def _key_masks(blocks: SampleBlocks) -> list[Tensor]:
    """Return for each block [samples, 1, width, width], true where the key is no padding."""
    is_real = torch.zeros(len(blocks.sources), dtype=torch.bool, device=blocks.slots.device)
    is_real[blocks.slots] = True
    sizes = [block.samples * block.width for block in blocks.shapes]
    return [
        keys.view(block.samples, 1, 1, block.width).expand(-1, -1, block.width, -1)
        for block, keys in zip(blocks.shapes, torch.split(is_real, sizes), strict=True)
    ]


class _ToBlocks(torch.autograd.Function):
    """Copies flat positions to padded ones; gradients of padding are dropped.

    Not `index_select`, whose gradient adds up rows that may repeat: a second pass over the memory,
    and in no fixed order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class _FromBlocks(torch.autograd.Function):
    """Copies padded positions back to flat ones; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = len(x)
        return x.index_select(0, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, slots, grad), None


@cache
def _varlen() -> tuple[Callable[..., Any], bool] | None:
    """Return torch's attention of flat rows, and whether heads may share keys; None without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = signature(varlen_attn).parameters
    # Before windows came, it had another argument for causal attention.
    return (varlen_attn, "enable_gqa" in known) if "window_size" in known else None


def attend_varlen(
    attend: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: SampleLengths,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    softcap: float | None = None,
) -> Tensor:
    """Attend with torch's flash attention for flat rows; what it cannot do is done in blocks.

    That is fp32, chunks, sinks, capped scores, and heads of more than 256 numbers. See
    `attend_in_blocks`.
    """
    varlen, width = _varlen(), query.shape[-1]
    reaches_all = chunk is None or chunk >= lengths.longest
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if (
        varlen is None
        or not is_half
        or not reaches_all
        or sinks is not None
        or softcap is not None
        or width % 8
        or width > FLASH_MAX_WIDTH
    ):
        limits = {"window": window, "chunk": chunk, "sinks": sinks, "softcap": softcap}
        return attend_in_blocks(attend, query, key, value, lengths, causal=causal, **limits)
    function, shares_heads = varlen
    missing, W = width - value.shape[-1], value.shape[-1]
    if missing:
        value = F.pad(value, (0, missing))  # flash attention has one width for all
    repeats, arguments = query.shape[2] // key.shape[2], {}
    if repeats > 1 and shares_heads:
        arguments = {"enable_gqa": True}
    elif repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    out: Tensor = function(
        *(query[0], key[0], value[0], lengths.offsets, lengths.offsets),
        *(lengths.longest, lengths.longest),
        # How many keys before and after its own a query sees: -1 is all.
        window_size=(-1 if window is None else window - 1, 0 if causal else -1),
        **arguments,
    )
    return out[None, ..., :W]
