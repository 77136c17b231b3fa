"""Attention whose keys and values come from one narrow vector a position."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...kernels.attention.local import Mask
from ...kernels.choose import Kernels
from ..language_model import BlockCache
from .configs import LatentSizes
from .dense import Linear, RMSNorm
from .largest_scores import LargestScores
from .rotary import interleaved_to_half

LATENT_EPS = 1e-6
"""of the latents' norms: fixed in the published code, whatever `rms_norm_eps` is"""


class LatentAttention(nn.Module):
    """Norm and multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are made from a latent of C numbers; beside it each position has
    one key of R numbers that the rotary embedding rotates and that all heads share. Of a
    head's K = N + R numbers the last R are rotated, in interleaved pairs. The cache holds C + R.

    Args:
        dim: width of the residual stream.
        num_heads: number of heads, H.
        sizes: widths of the latents and of the heads.
        query_scale: factor of the scores, beside 1 / sqrt(K).
        norm_eps: see `RMSNorm`; of the norm before the layer, not of the latents'.
        kernels: the implementations.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sizes: LatentSizes,
        query_scale: float,
        norm_eps: float,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.query_scale = query_scale
        self.norm = RMSNorm(dim, norm_eps, kernels)
        queries = num_heads * sizes.key_head_dim
        if sizes.q_lora_rank is None:
            self.q = Linear(dim, queries)
        else:
            self.q_down = Linear(dim, sizes.q_lora_rank)
            self.q_norm = RMSNorm(sizes.q_lora_rank, LATENT_EPS, kernels)
            self.q_up = Linear(sizes.q_lora_rank, queries)
        self.kv_down = Linear(dim, sizes.kv_lora_rank + sizes.rope_head_dim)
        self.kv_norm = RMSNorm(sizes.kv_lora_rank, LATENT_EPS, kernels)
        self.kv_up = Linear(sizes.kv_lora_rank, num_heads * sum(self._ups))
        self.o = Linear(num_heads * sizes.value_head_dim, dim)
        self.attention = kernels.attention
        self.scores = LargestScores(kernels)
        self.rotary = kernels.rotary

    @property
    def _ups(self) -> tuple[int, int]:
        """Widths of what a head makes from the latent: N for its key, W for its value."""
        return self.sizes.nope_head_dim, self.sizes.value_head_dim

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """Return what [B, S, D] adds to the residual stream; see `GroupedQueryAttention`."""
        sizes, x_BSD = self.sizes, self.norm(x)
        q_BSHK = self._queries(x_BSD, cos, sin)
        widths = (sizes.kv_lora_rank, sizes.rope_head_dim)
        latent_BSC, rotated_BSR = self.kv_down(x_BSD).split(widths, dim=-1)
        latent_BSC = self.kv_norm(latent_BSC)
        rotated_BS1R = self.rotary(interleaved_to_half(rotated_BSR.unsqueeze(2)), cos, sin)
        attend = self._attend
        if cache is not None:
            latent_BL1C, rotated_BS1R = cache.extend(latent_BSC.unsqueeze(2), rotated_BS1R)
            latent_BSC = latent_BL1C.squeeze(2)
            # `_attend` applies `kv_up` to every position, and this to C rows. The scores of latents
            # are C + R wide instead of K, which pays for few queries only.
            if max(x.shape[1], sizes.kv_lora_rank) < cache.length:
                attend = self._attend_to_latents
        out_BSHW = attend(q_BSHK, latent_BSC, rotated_BS1R, mask)
        out_BSD: Tensor = self.o(out_BSHW.flatten(2))
        return out_BSD

    def _queries(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return [B, S, H, K], the last R of K rotated."""
        sizes = self.sizes
        if sizes.q_lora_rank is None:
            up, narrow = self.q, x_BSD
        else:
            up, narrow = self.q_up, self.q_norm(self.q_down(x_BSD))
        # Scores are linear in the queries, so the factor fits where the tensor is narrowest.
        if self.query_scale != 1.0:
            narrow = narrow * self.query_scale
        q_BSHK = up(narrow).unflatten(-1, (-1, sizes.key_head_dim))
        q_BSHN, q_BSHR = q_BSHK.split((sizes.nope_head_dim, sizes.rope_head_dim), dim=-1)
        return torch.cat((q_BSHN, self.rotary(interleaved_to_half(q_BSHR), cos, sin)), dim=-1)

    def _attend(
        self, q_BSHK: Tensor, latent_BLC: Tensor, rotated_BL1R: Tensor, mask: Mask
    ) -> Tensor:
        """Return [B, S, H, W], with keys and values of all positions made from the latents."""
        made_BLHJ = self.kv_up(latent_BLC).unflatten(-1, (-1, sum(self._ups)))
        k_BLHN, v_BLHW = made_BLHJ.split(self._ups, dim=-1)
        # The heads are counted on the tensor: a rank may hold some of them only.
        shared_BLHR = rotated_BL1R.expand(-1, -1, k_BLHN.shape[2], -1)
        k_BLHK = torch.cat((k_BLHN, shared_BLHR), -1)
        self.scores.add(q_BSHK, k_BLHK, mask, {})
        out: Tensor = self.attention(q_BSHK, k_BLHK, v_BLHW, mask)
        return out

    def _attend_to_latents(
        self, q_BSHK: Tensor, latent_BLC: Tensor, rotated_BL1R: Tensor, mask: Mask
    ) -> Tensor:
        """Return what `_attend` does, for few queries and many positions.

        What makes keys of latents makes queries for latents instead, and what makes values is
        applied to the mean of latents: the same products in another order (section 2.1.2).
        """
        C = latent_BLC.shape[-1]
        # Not the weight: there may be an adapter beside it.
        made_CHJ = self.kv_up(torch.eye(C, dtype=latent_BLC.dtype, device=latent_BLC.device))
        to_key_CHN, to_value_CHW = made_CHJ.unflatten(-1, (-1, sum(self._ups))).split(self._ups, -1)
        N, R = self.sizes.nope_head_dim, self.sizes.rope_head_dim
        q_BSHN, q_BSHR = torch.split(q_BSHK, [N, R], -1)
        q_BSHC = torch.einsum("bshn,chn->bshc", q_BSHN, to_key_CHN)
        # Attention divides by the root of this width.
        query = torch.cat((q_BSHC, q_BSHR), -1) * math.sqrt((C + R) / (N + R))
        latent_BL1C = latent_BLC.unsqueeze(2)
        key = torch.cat((latent_BL1C, rotated_BL1R), -1)
        mean_BSHC = self.attention(query, key, latent_BL1C, mask)
        return torch.einsum("bshc,chw->bshw", mean_BSHC, to_value_CHW)
