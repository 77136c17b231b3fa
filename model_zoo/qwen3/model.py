"""Qwen3 (Yang et al. 2025, arXiv:2505.09388, section 2)."""

from __future__ import annotations

from ...kernels.choose import Kernels
from ..decoder import Block, Decoder
from ..layers.attention import GroupedQueryAttention
from ..layers.dense import GatedMLP
from ..layers.moe import MoE
from .config import Qwen3Config


class Qwen3(Decoder):
    """Qwen3."""

    config: Qwen3Config

    def block(self, number: int, kernels: Kernels) -> Block:
        """Return a block, with experts or without."""
        config = self.config
        attention = GroupedQueryAttention(config, kernels, qk_norm=True)
        if config.moe is not None:
            return Block(attention, MoE(config.dim, config.moe, config.norm_eps, kernels))
        return Block(attention, GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels))
