"""Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.choose import Kernels
from ..decoder import Block, Decoder
from ..layers.attention import GroupedQueryAttention
from ..layers.dense import GatedMLP
from ..layers.rotary import stretch
from .config import Llama3Config


class Llama3(Decoder):
    """Llama 3."""

    config: Llama3Config

    def block(self, number: int, kernels: Kernels) -> Block:
        """Return a block."""
        config = self.config
        return Block(
            GroupedQueryAttention(config, kernels),
            GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels),
        )

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies, stretched where the config says so."""
        found, scaling = super().rotary_frequencies(device), self.config.rope_scaling
        return found if scaling is None else stretch(found, **scaling.model_dump())
