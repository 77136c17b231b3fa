"""The largest attention scores of each query, in the place of attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""most scores that are in memory at a time"""


def largest_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001 # called as an implementation of `reference` is
    mask: Tensor | None = None,
    sinks: Tensor | None = None,  # noqa: ARG001
    *,
    causal: bool = True,
    softcap: float | None = None,  # noqa: ARG001 # scores are those before it
) -> Tensor:
    """Return the largest score of each query with the keys that it sees, [B, S, H, 1].

    A score is a product of a query and a key over the root of their width. Queries are computed in
    chunks, so that the scores of a row are never in memory together. Where a query sees nothing,
    the result is -inf.

    Args:
        query: see `reference.sdpa`; so are the others.
        key: see there.
        value: see there; unused.
        mask: see there; here a query may see nothing.
        sinks: see there; unused.
        causal: see there.
        softcap: see there; unused.
    """
    B, S, H, K = query.shape
    L, G = key.shape[1:3]
    k_BGKL = key.permute(0, 2, 3, 1)
    rows = max(1, CHUNK_ELEMENTS // max(1, B * H * L))
    places = torch.arange(L, device=query.device)
    found = []
    for first in range(0, S, rows):
        q_BRHK = query[:, first : first + rows]
        R = q_BRHK.shape[1]
        # The queries that share a key head stand side by side: [B, G, H / G * R, K].
        q = q_BRHK.transpose(1, 2).reshape(B, G, H // G * R, K)
        scores_BHRL = (q @ k_BGKL).view(B, H, R, L) / math.sqrt(K)
        if mask is not None:
            scores_BHRL = scores_BHRL.masked_fill(~mask[:, :, first : first + R], -math.inf)
        elif causal:  # the last query stands at the last key
            own = places[L - S + first : L - S + first + R]
            scores_BHRL = scores_BHRL.masked_fill(places > own.unsqueeze(1), -math.inf)
        found.append(scores_BHRL.amax(3).transpose(1, 2))
    return torch.cat(found, dim=1).unsqueeze(3)
