"""Causal grouped-query attention in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with torch's fused attention.

    Args:
        query: [B, S, H, K].
        key: [B, L, G, K] with L >= S; query head h reads key head h // (H / G).
        value: [B, L, G, K].
        mask: [B or 1, 1, S, L] bool, true where a query sees a key, at least once a row. Without
            it attention is causal, and the last query sees every key.

    Returns:
        [B, S, H, K].
    """
    q_BHSK, k_BGLK, v_BGLK = (x.transpose(1, 2) for x in (query, key, value))
    S, L = query.shape[1], key.shape[1]
    if mask is None and 1 < S < L:
        mask = _causal(S, L, query.device)
    grouped = query.shape[2] != key.shape[2]
    if grouped and mask is not None and query.is_cuda:
        # torch's only CUDA kernel with a mask does not know grouped heads.
        repeats = query.shape[2] // key.shape[2]
        k_BGLK, v_BGLK = (x.repeat_interleave(repeats, dim=1) for x in (k_BGLK, v_BGLK))
        grouped = False
    out_BHSK = F.scaled_dot_product_attention(
        q_BHSK,
        k_BGLK,
        v_BGLK,
        attn_mask=mask,
        is_causal=mask is None and S == L,
        enable_gqa=grouped,
    )
    return out_BHSK.transpose(1, 2)


def matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with plain products: what `sdpa` computes, holding all scores.

    Query heads that share a key head are stacked along the positions, so that keys and values are
    never repeated. The softmax runs in fp32 at least.
    """
    B, S, H, K = query.shape
    L, G = key.shape[1], key.shape[2]
    R = H // G
    visible = _causal(S, L, query.device) if mask is None else mask.unsqueeze(2)
    q_BGRSK = (query * K**-0.5).view(B, S, G, R, K).permute(0, 2, 3, 1, 4)
    q_BGTK = q_BGRSK.reshape(B, G, R * S, K)
    scores_BGRSL = (q_BGTK @ key.permute(0, 2, 3, 1)).view(B, G, R, S, L)
    weights_BGRSL = scores_BGRSL.masked_fill(~visible, float("-inf")).softmax(-1)
    out_BGTK = weights_BGRSL.view(B, G, R * S, L) @ value.transpose(1, 2)
    return out_BGTK.view(B, G, R, S, K).permute(0, 3, 1, 2, 4).reshape(B, S, H, K)


def _causal(S: int, L: int, device: torch.device) -> Tensor:
    return torch.ones(S, L, dtype=torch.bool, device=device).tril(L - S)
