"""Attention within the samples of a flat row, without computing padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ragged.lengths import SampleBlocks, SampleLengths
from .varlen import attend_runs, takes_varlen

Attention = Callable[..., Tensor]


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
    """Attend with flash attention for flat rows; what it cannot do is done in blocks.

    That is fp32, chunks, capped scores, and heads of more than 256 numbers. See
    `attend_in_blocks`.
    """
    reaches_all = chunk is None or chunk >= lengths.longest
    if not reaches_all or softcap is not None or not takes_varlen(query):
        limits = {"window": window, "chunk": chunk, "sinks": sinks, "softcap": softcap}
        return attend_in_blocks(attend, query, key, value, lengths, causal=causal, **limits)
    out = attend_runs(
        *(query[0], key[0], value[0], lengths.offsets, lengths.offsets),
        longest=(lengths.longest, lengths.longest),
        window=window,
        sinks=sinks,
        causal=causal,
    )
    return out.unsqueeze(0)
