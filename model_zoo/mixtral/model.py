"""Mixtral (Jiang et al. 2024, arXiv:2401.04088, section 2)."""

from __future__ import annotations

from ...kernels.choose import Kernels
from ..decoder import Block, Decoder
from ..layers.attention import GroupedQueryAttention
from ..layers.moe import MoE
from .config import MixtralConfig


class Mixtral(Decoder):
    """Mixtral."""

    config: MixtralConfig

    def block(self, number: int, kernels: Kernels) -> Block:
        """Return a block."""
        config = self.config
        return Block(
            GroupedQueryAttention(config, kernels),
            MoE(config.dim, config.moe, config.norm_eps, kernels),
        )
