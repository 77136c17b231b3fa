"""The attention half of a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention.local import Mask
from ...kernels.choose import Kernels
from ...kernels.ragged.lengths import SampleLengths
from ..grouped_query_config import GroupedQueryConfig
from ..language_model import BlockCache
from .dense import Linear, LocalParameters, RMSNorm, make_norms
from .largest_scores import LargestScores


class GroupedQueryAttention(LocalParameters):
    """Norms and causal attention whose query heads share key-value heads (arXiv:2305.13245).

    Args:
        config: sizes, and where the norms and biases are.
        kernels: the implementations.
        sinks: whether each head has a learned score for attention that goes nowhere.
        window: see `kernels.attention.local.attend`.
        chunk: see there.
    """

    def __init__(
        self,
        config: GroupedQueryConfig,
        kernels: Kernels,
        *,
        sinks: bool = False,
        window: int | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        dim, norm_eps, biases = config.dim, config.norm_eps, config.biases
        queries, keys = config.n_heads * config.head_width, config.n_kv_heads * config.head_width
        self.head_width = config.head_width
        self.rotary_width = config.rotary_width
        self.query_scale, self.softcap = config.query_scale, config.score_softcap
        self.window, self.chunk = window, chunk
        self.norm, self.post_norm = make_norms(dim, norm_eps, kernels, config.norms)
        self.q = Linear(dim, queries, bias="q" in biases)
        self.k = Linear(dim, keys, bias="k" in biases)
        self.v = Linear(dim, keys, bias="v" in biases)
        self.o = Linear(queries, dim, bias="o" in biases)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if sinks else None
        self.has_wide_norms = config.has_wide_norms
        self.q_norm = self.k_norm = None
        if widths := config.qk_norm_widths:
            self.q_norm, self.k_norm = (RMSNorm(width, norm_eps, kernels) for width in widths)
        self.attention = kernels.attention
        self.scores = LargestScores(kernels)
        self.rotary = kernels.rotary

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """Return what [B, S, D] adds to the residual stream.

        Args:
            x: [B, S, D].
            cos: see `rotation`.
            sin: see `rotation`.
            mask: see `Kernels.attention_mask`; None where only causality counts.
            cache: earlier keys and values; extended.
        """
        x_BSD = x if self.norm is None else self.norm(x)
        heads = (*x_BSD.shape[:2], -1, self.head_width)
        q_BSHK, k_BSGK = self.q(x_BSD).view(heads), self.k(x_BSD).view(heads)
        v_BSGK = self.v(x_BSD).view(heads)
        # Keys are cached with their rotation, which depends on their own position alone.
        q_BSHK, k_BSGK = self.apply_rotary(q_BSHK, k_BSGK, cos, sin)
        if self.query_scale != 1.0:
            q_BSHK = q_BSHK * self.query_scale
        if cache is not None:
            k_BSGK, v_BSGK = cache.extend(k_BSGK, v_BSGK)
        limits = self._limits(mask)
        self.scores.add(q_BSHK, k_BSGK, mask, limits)
        out_BSHK = self.attention(q_BSHK, k_BSGK, v_BSGK, mask, **limits)
        out_BSD: Tensor = self.o(out_BSHK.flatten(2))
        return out_BSD if self.post_norm is None else self.post_norm(out_BSD)

    def apply_rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, S, H, K] and keys [B, S, G, K], after their norms if there are any."""
        if self.q_norm is not None and self.k_norm is not None:
            if self.has_wide_norms:
                query = self.q_norm(query.flatten(2)).view_as(query)
                key = self.k_norm(key.flatten(2)).view_as(key)
            else:
                query, key = self.q_norm(query), self.k_norm(key)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.rotary_width
        if width == self.head_width:
            return self.rotary(x, cos, sin)
        return torch.cat((self.rotary(x[..., :width], cos, sin), x[..., width:]), -1)

    def _limits(self, mask: Mask) -> dict[str, Any]:
        """Return the keyword arguments of attention; a mask separates chunks already."""
        chunk = self.chunk if mask is None or isinstance(mask, SampleLengths) else None
        sinks = None if self.sinks is None else self.local("sinks")
        limits = {"window": self.window, "chunk": chunk}
        given = {**limits, "sinks": sinks, "softcap": self.softcap}
        # Only what is set, so that an implementation without sinks or chunks serves other models.
        return {name: value for name, value in given.items() if value is not None}
