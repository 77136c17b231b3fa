"""Sliding-window and chunked attention, by any implementation of `reference`.

A row is cut into blocks, and each block attends to the keys that it can reach as if it were a row
of its own. So work and memory grow with the reach, and not with the length of the row. On GPUs
flash attention leaves out the rest by itself: see `varlen`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ragged.lengths import SampleLengths
from .ragged import attend_in_blocks
from .varlen import Documents, takes_varlen

Attention = Callable[..., Tensor]
Mask = Tensor | Documents | tuple[Tensor | Documents, ...] | SampleLengths | None
"""which keys a query sees; lengths: the keys before it in its sample of a flat row; several: one
for each of the pieces of a rank of the context axis"""
SMALLEST_BLOCK = 64


def attend(
    base: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Documents | SampleLengths | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    softcap: float | None = None,
    ragged: Attention = attend_in_blocks,
    varlen: Attention | None = None,
) -> Tensor:
    """Attend to the keys within reach.

    Args:
        base: an implementation in `reference`.
        query: see there.
        key: see there.
        value: see there.
        mask: see there; or the documents of packed rows; or the lengths of the samples of a flat
            row, where B = 1.
        window: how many keys a query sees at most, its own the last (arXiv:2004.05150, section 3).
        chunk: a query sees the keys of its own chunk of so many positions, counted from the first
            key (Llama 4). Not with a mask: chunks are then told apart in it, as documents are.
        sinks: see there.
        causal: see there; windows and chunks are of causal attention.
        softcap: see there.
        ragged: attends within the samples of a flat row; see `ragged.attend_in_blocks`.
        varlen: attends in place of `base` where that would need a mask, if it takes the dtype and
            the width of heads; see `varlen.attend_rows`. None: `base` does it all.

    Returns:
        [B, S, H, K].
    """
    assert causal or window is chunk is None, "windows and chunks look back only"
    if isinstance(mask, SampleLengths):
        limits: dict[str, Any] = {"causal": False}
        if causal:
            limits = {"window": window, "chunk": chunk, "sinks": sinks}
        if softcap is not None:
            limits["softcap"] = softcap
        return ragged(partial(attend, base), query, key, value, mask, **limits)
    length = key.shape[1]
    documents, mask = (mask, None) if isinstance(mask, Documents) else (None, mask)
    if varlen is not None and softcap is None and takes_varlen(query):
        is_local = window is not None and window < length
        reaches_all = chunk is None or chunk >= length
        is_masked = causal and mask is None and (is_local or 1 < query.shape[1] < length)
        if documents is not None or (reaches_all and is_masked):
            limits = {"window": window, "sinks": sinks, "causal": causal}
            return varlen(query, key, value, documents, **limits)
    if documents is not None:
        mask = documents.mask(causal=causal)
    if softcap is not None:
        # Only where it is set, so that an implementation without it serves other models.
        base = partial(base, softcap=softcap)
    if not causal:
        return base(query, key, value, mask, sinks, causal=False)
    assert chunk is None or mask is None, "a mask tells chunks apart itself"
    if window is not None and window < length:
        return _attend_windows(base, query, key, value, mask, window, sinks)
    if chunk is not None and chunk < length:
        return _attend_chunks(base, query, key, value, chunk, sinks)
    return base(query, key, value, mask, sinks)


def _attend_windows(
    base: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in blocks of queries, each to the keys from `window - 1` before its first one."""
    B, S = query.shape[:2]
    # A block as long as the window has at most twice the keys that its queries see; shorter blocks
    # would waste less and be many small products.
    rows = min(S, max(window, SMALLEST_BLOCK))
    # Keys of a block overlap with those of the next; the first block's may begin before the row.
    span, before, after = rows + window - 1, window - 1 - (key.shape[1] - S), -S % rows
    blocks = (S + after) // rows
    # Blocks become batch rows: any implementation of attention takes them.
    q_NSHK = F.pad(query, (0, 0, 0, 0, 0, after)).view(B * blocks, rows, *query.shape[2:])
    k_NLGK, v_NLGK = (
        F.pad(x, (0, 0, 0, 0, before, after))
        .unfold(1, span, rows)
        .movedim(-1, 2)
        .reshape(B * blocks, span, *x.shape[2:])
        for x in (key, value)
    )
    # Query r sees the keys r to r + window - 1 of its block's span.
    seen_RL = torch.ones(rows, span, dtype=torch.bool, device=query.device).tril(span - rows).triu()
    if mask is None:
        number = torch.arange(blocks * rows, device=query.device).view(blocks, rows)[:, :1]
        is_key_NL = number + torch.arange(span, device=query.device) >= before
        seen = (seen_RL & is_key_NL.unsqueeze(1)).expand(B, -1, -1, -1)
    else:
        # A query that only fills the last block up may see anything, so that it sees something.
        padded = F.pad(F.pad(mask[:, 0], (before, after)), (0, 0, 0, after), value=True)
        blocks_BRLN = padded.unfold(1, rows, rows).unfold(2, span, rows).diagonal(0, 1, 2)
        seen = seen_RL & blocks_BRLN.movedim(-1, 1)
    out = base(q_NSHK, k_NLGK, v_NLGK, seen.reshape(B * blocks, 1, rows, span), sinks)
    return out.reshape(B, S + after, *out.shape[2:])[:, :S]


def _attend_chunks(
    base: Attention, query: Tensor, key: Tensor, value: Tensor, chunk: int, sinks: Tensor | None
) -> Tensor:
    """Attend in rows of a chunk each."""
    # Earlier chunks are out of reach of all queries: their keys need not be read.
    B, S = query.shape[:2]
    start = (key.shape[1] - S) // chunk * chunk  # of the first query's chunk
    key, value = key[:, start:], value[:, start:]
    L = key.shape[1]
    if chunk >= L:
        return base(query, key, value, None, sinks)
    # Queries that only fill chunks up, in front and behind, see themselves.
    after = -L % chunk
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, L - x.shape[1], after)).view(-1, chunk, *x.shape[2:])
        for x in (query, key, value)
    )
    out = base(q, k, v, None, sinks)
    return out.reshape(B, L + after, *out.shape[2:])[:, L - S : L]
