"""Grouped-query attention in plain torch, causal or in both directions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..softcap import softcap as cap_softly
from .partial_sdpa import attend_in_one_part


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
    softcap: float | None = None,
) -> Tensor:
    """Attend with torch's fused attention.

    Args:
        query: [B, S, H, K].
        key: [B, L, G, K] with L >= S; query head h reads key head h // (H / G).
        value: [B, L, G, W] with W <= K.
        mask: [B, 1, S, L] bool, true where a query sees a key. Each query sees one at least, and
            where attention is causal none that is later than itself.
        sinks: [H], the score of one more key for each head, whose value is zero: where no key is
            worth attention, it goes there (Xiao et al. 2023, arXiv:2309.17453, section 3.3).
        causal: whether a query sees no later key; the last query then stands at the last key. Else
            it sees all, or those of the mask; not with sinks.
        softcap: scores are capped at it before the mask, see `softcap.softcap`; None: they are not.
            No fused kernel does it: they are plain products then, and log sums are kept instead of
            weights.

    Returns:
        [B, S, H, W].
    """
    assert causal or sinks is None, "sinks are for causal attention"
    if sinks is not None or softcap is not None:
        return attend_in_one_part(query, key, value, mask, sinks, softcap, causal)
    W, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    if missing:
        # Flash attention has one width for all.
        value = F.pad(value, (0, missing))
    q_BHSK, k_BGLK, v_BGLK = (x.transpose(1, 2) for x in (query, key, value))
    S, L = query.shape[1], key.shape[1]
    # is_causal puts the first query at the first key; here the last query stands at the last key.
    if causal and mask is None and 1 < S < L:
        mask = torch.ones(S, L, dtype=torch.bool, device=query.device).tril(L - S)
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1 and mask is not None and query.is_cuda:
        # What is left to masks on GPUs is fp32 and unusual widths (see `varlen`): the only fused
        # kernel for those does not know grouped heads.
        k_BGLK, v_BGLK = (x.repeat_interleave(repeats, dim=1) for x in (k_BGLK, v_BGLK))
    out_BHSK = F.scaled_dot_product_attention(
        q_BHSK,
        k_BGLK,
        v_BGLK,
        attn_mask=mask,
        # A mask would rule out flash attention.
        is_causal=causal and mask is None and S == L,
        # Asked for only where heads differ: fewer fused kernels take it.
        enable_gqa=k_BGLK.shape[1] != q_BHSK.shape[1],
    )
    return out_BHSK.transpose(1, 2)[..., :W]


def document_mask(
    queries: Tensor,
    keys: Tensor,
    *,
    causal: bool = True,
    max_documents: int | None = None,  # noqa: ARG001 # called as `find_documents` is
) -> Tensor:
    """Return which positions see which: those before them, and themselves, of their document.

    Args:
        queries: [B, S] number of each position's document; the last one stands at the last key.
        keys: [B, L].
        causal: whether positions see no later ones; else they see all of their document.
        max_documents: unused; see `varlen.find_documents`.

    Returns:
        [B, 1, S, L] bool.
    """
    same_BSL = queries.unsqueeze(2) == keys.unsqueeze(1)
    if not causal:
        return same_BSL.unsqueeze(1)
    S, L = queries.shape[1], keys.shape[1]
    causal_SL = torch.ones(S, L, dtype=torch.bool, device=queries.device).tril(L - S)
    return (causal_SL & same_BSL).unsqueeze(1)


def matmul(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
    softcap: float | None = None,
) -> Tensor:
    """Attend with plain products, a piece of the queries at a time: what `sdpa` computes.

    Where attention is causal a piece leaves out the keys after its end, nearly half of all work;
    else there is one piece. Query heads that share a
    key head are stacked along the positions, so that keys and values are never repeated. Holds
    the weights of all pieces for the backward pass: memory grows with S * L / 2.
    """
    B, S, H, K = query.shape
    L, G, W = value.shape[1:]
    R = H // G
    q_BGRSK = query.view(B, S, G, R, K).permute(0, 2, 3, 1, 4)
    k_BKL = key.permute(0, 2, 3, 1).reshape(B * G, K, L)
    v_BLW = value.transpose(1, 2).reshape(B * G, L, W)
    # Eight pieces leave out 7 / 16 of the work. Products of fewer than 64 rows are too small to be
    # fast.
    rows = max(64, -(-S // 8)) if causal else S
    pieces = []
    for first in range(0, S, rows):
        last = min(first + rows, S)
        end = L - S + last
        q_BTK = q_BGRSK[:, :, :, first:last].reshape(B * G, -1, K)
        seen = None if mask is None else mask[:, :, first:last, :end]
        bias = _bias(query, last - first, end, G, R, seen, causal=causal)
        if softcap is None:
            # Mask and scale are applied in the pass that writes the product.
            scores_BTL = torch.baddbmm(bias, q_BTK, k_BKL[..., :end], alpha=K**-0.5)
        else:
            scores_BTL = cap_softly(q_BTK @ k_BKL[..., :end] * K**-0.5, softcap) + bias
        if sinks is not None:
            # A sink is one more column of the softmax, and no row of the values.
            sinks_T = sinks.to(query.dtype).view(G, R).repeat_interleave(last - first, 1)
            sinks_BT1 = sinks_T.repeat(B, 1).unsqueeze(-1)
            scores_BTL = torch.cat([scores_BTL, sinks_BT1], -1)
        piece_BTW = scores_BTL.softmax(-1)[..., :end] @ v_BLW[:, :end]
        pieces.append(piece_BTW.view(B, G, R, -1, W))
    out_BGRSW = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=3)
    return out_BGRSW.permute(0, 3, 1, 2, 4).reshape(B, S, H, W)


def _bias(
    like: Tensor, S: int, L: int, G: int, R: int, mask: Tensor | None, *, causal: bool
) -> Tensor:
    """Return 0 where a query sees a key and -inf elsewhere: [R * S, L] or [B * G, R * S, L]."""
    minus_inf = float("-inf")
    if mask is None and not causal:
        return like.new_zeros(1, 1)
    if mask is None:
        return like.new_full((S, L), minus_inf).triu(L - S + 1).repeat(R, 1)
    bias_B1SL = like.new_zeros(mask.shape).masked_fill(~mask, minus_inf)
    return bias_B1SL.unsqueeze(1).expand(-1, G, R, -1, -1).reshape(-1, R * S, L)
