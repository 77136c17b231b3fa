"""Llama 4's text model.

Sources: the model cards' iRoPE, and `Attention` and `MoE` in
https://github.com/meta-llama/llama-models/tree/main/models/llama4
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ..decoder import Block, Decoder, Tables
from ..language_model import KVCache
from ..layers.attention import GroupedQueryAttention
from ..layers.dense import GatedMLP
from ..layers.moe import Experts, MoE
from ..layers.rotary import halves, stretch
from .config import Llama4Config


class Llama4Attention(GroupedQueryAttention):
    """Attention of one of two kinds.

    Most blocks turn queries and keys, and see a chunk of the row. The others see all of it, and
    know where queries are by their scale alone: the later, the larger (arXiv:2501.19399).

    Args:
        config: sizes.
        number: of the block.
        kernels: the implementations.
    """

    def __init__(self, config: Llama4Config, number: int, kernels: Kernels) -> None:
        is_turned = config.is_turned(number)
        super().__init__(config, kernels, chunk=config.chunk if is_turned else None)
        self.is_turned = is_turned
        self.norm_eps = config.norm_eps if config.qk_norm else None

    def place(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn both and normalise them, or scale the queries by `cos`."""
        if not self.is_turned:
            return (query * cos).to(query.dtype), key
        q_BSHK, k_BSGK = super().place(halves(query), halves(key), cos, sin)
        return self._normalised(q_BSHK), self._normalised(k_BSGK)

    def _normalised(self, x: Tensor) -> Tensor:
        if self.norm_eps is None:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, x.shape[-1:], eps=self.norm_eps).to(x.dtype)


class Llama4Experts(Experts):
    """Experts that read rows times their weights, instead of being weighted."""

    def compute(self, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return each row as its expert makes it; see `Experts`."""
        weighted_MD = (rows * weight.unsqueeze(1)).to(rows.dtype)
        return super().compute(weighted_MD, torch.ones_like(weight), offs)


class Llama4MoE(MoE):
    """A shared expert, and a routed one."""

    def make_experts(self, dim: int, kernels: Kernels) -> Experts:
        """Return the experts."""
        return Llama4Experts(dim, self.settings, kernels)


class Llama4(Decoder):
    """Llama 4."""

    config: Llama4Config

    def block(self, number: int, kernels: Kernels) -> Block:
        """Return a block of one of two kinds of attention, and of experts or without."""
        config = self.config
        mlp: nn.Module
        if config.has_experts(number):
            mlp = Llama4MoE(config.dim, config.moe, config.norm_eps, kernels)
        else:
            mlp = GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels)
        return Block(Llama4Attention(config, number, kernels), mlp)

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies, stretched where the config says so."""
        found, scaling = super().rotary_frequencies(device), self.config.rope_scaling
        return found if scaling is None else stretch(found, **scaling.model_dump())

    def tables(
        self, positions: Tensor, document_ids: Tensor | None, cache: KVCache | None
    ) -> Sequence[Tables]:
        """Return rotation and mask, or queries' scale and mask, for each block."""
        ids = document_ids
        if ids is not None:
            # Chunks of a document are told apart as documents are.
            ids = (ids.long() << 32) | (positions // self.config.chunk)
        keys = ids if cache is None else cache.extend(positions.shape[-1], ids)
        near = far = None
        if ids is not None and keys is not None:
            near = self.attention_mask(ids, keys)
            far = self.attention_mask(ids >> 32, keys >> 32)
        scale = self._scale(positions)
        turned, still = (*self.rotation(positions), near), (scale, scale, far)
        blocks = range(self.config.n_layers)
        return [turned if self.config.is_turned(number) else still for number in blocks]

    def _scale(self, positions: Tensor) -> Tensor:
        """Return what queries at [S] or [B, S] positions are multiplied by, [..., S, 1, 1]."""
        config = self.config
        steps = ((positions + 1) // config.temperature_floor).float()
        scale: Tensor = 1.0 + config.temperature_scale * torch.log1p(steps)
        return scale[..., None, None]
