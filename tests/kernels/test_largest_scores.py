"""The largest attention scores of queries are those of a product of all queries and keys."""

import math

import pytest
import torch

from trainer.kernels.attention import largest
from trainer.kernels.attention.local import attend
from trainer.kernels.choose import LARGEST_SCORES


def brute_force(query, key, seen):
    """Return [B, S, H, 1]; seen: which queries see which keys, [B, S, L]."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    scores = torch.einsum("bshk,blhk->bshl", query, key) / math.sqrt(query.shape[3])
    return scores.masked_fill(~seen.unsqueeze(2), -math.inf).amax(3, keepdim=True)


@pytest.mark.parametrize("kind", ["causal", "window", "chunk", "documents", "both", "later"])
@pytest.mark.parametrize("elements", [2**22, 50])
def test_scores_are_those_of_all_pairs_that_are_seen(kind, elements, monkeypatch):
    monkeypatch.setattr(largest, "CHUNK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    B, S, L, H, G, K = 2, 9, 13 if kind == "later" else 9, 4, 2, 6
    query = torch.randn(B, S, H, K, generator=generator, dtype=torch.float64)
    key = torch.randn(B, L, G, K, generator=generator, dtype=torch.float64)
    q, k = torch.arange(L - S, L).unsqueeze(1), torch.arange(L)
    seen, limits, mask = (k <= q).expand(B, -1, -1), {}, None
    if kind == "window":
        limits, seen = {"window": 3}, seen & (k > q - 3)
    elif kind == "chunk":
        limits, seen = {"chunk": 4}, seen & (k // 4 == q // 4)
    elif kind == "documents":
        ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])
        seen = seen & (ids.unsqueeze(2) == ids.unsqueeze(1))
        mask = seen.unsqueeze(1)
    elif kind == "both":
        limits, seen = {"causal": False}, torch.ones(B, S, L, dtype=torch.bool)
    found = LARGEST_SCORES(query, key, key[..., :1], mask, **limits)
    torch.testing.assert_close(found, brute_force(query, key, seen))
    assert LARGEST_SCORES.func is attend
