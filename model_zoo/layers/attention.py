"""The attention half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.choose import Kernels
from .cache import BlockCache
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
            mask: see `Kernels.attention_mask`; None where only causality counts.
            cache: earlier keys and values; extended.
        """
        x_BSD = self.norm(x)
        heads = (*x_BSD.shape[:2], -1, self.head_width)
        q_BSHK = self.rotary(self.q(x_BSD).view(heads), cos, sin)
        k_BSGK = self.rotary(self.k(x_BSD).view(heads), cos, sin)
        v_BSGK = self.v(x_BSD).view(heads)
        if cache is not None:
            k_BSGK, v_BSGK = cache.extend(k_BSGK, v_BSGK)
        out_BSHK = self.attention(q_BSHK, k_BSGK, v_BSGK, mask)
        out_BSD: Tensor = self.o(out_BSHK.flatten(2))
        return out_BSD
