"""The attention half of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.choose import Kernels
from .cache import BlockCache, KVCache
from .linear import Linear
from .norm import RMSNorm


class GroupedQueryAttention(nn.Module):
    """Norm and causal attention whose query heads share key-value heads (arXiv:2305.13245)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        norm_eps: float,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm = RMSNorm(dim, norm_eps, kernels)
        self.q = Linear(dim, num_heads * head_width)
        self.k = Linear(dim, num_kv_heads * head_width)
        self.v = Linear(dim, num_kv_heads * head_width)
        self.o = Linear(num_heads * head_width, dim)
        self.attention = kernels.attention
        self.rotary = kernels.rotary

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """Return what [B, S, D] adds to the residual stream.

        Args:
            x: [B, S, D].
            cos: see `rotation`.
            sin: see `rotation`.
            mask: see `attention_mask`.
            cache: earlier keys and values; extended.
        """
        x_BSD = self.norm(x)
        heads = (*x.shape[:2], -1, self.head_width)
        q_BSHK = self.rotary(self.q(x_BSD).view(heads), cos, sin)
        k_BSGK = self.rotary(self.k(x_BSD).view(heads), cos, sin)
        v_BSGK = self.v(x_BSD).view(heads)
        if cache is not None:
            k_BSGK, v_BSGK = cache.extend(k_BSGK, v_BSGK)
        out_BSHK = self.attention(q_BSHK, k_BSGK, v_BSGK, mask)
        out_BSD: Tensor = self.o(out_BSHK.flatten(2))
        return out_BSD


def attention_mask(
    tokens: Tensor, document_ids: Tensor | None, cache: KVCache | None
) -> Tensor | None:
    """Return which positions see which, [B, 1, S, L] bool, or None where only causality counts.

    Args:
        tokens: [B, S], of which only the shape matters.
        document_ids: [B, S], or None where rows have no borders.
        cache: extended by the new positions.
    """
    keys_BL = document_ids if cache is None else cache.extend(tokens.shape[1], document_ids)
    if document_ids is None or keys_BL is None:
        return None
    S, L = tokens.shape[1], keys_BL.shape[1]
    causal_SL = torch.ones(S, L, dtype=torch.bool, device=tokens.device).tril(L - S)
    same_BSL = document_ids.unsqueeze(2) == keys_BL.unsqueeze(1)
    return (same_BSL & causal_SL).unsqueeze(1)
