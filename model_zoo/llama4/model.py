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
from ..decoder import Decoder, Tables
from ..language_model import KVCache
from ..layers.attention import GroupedQueryAttention
from ..layers.experts import Experts
from ..layers.moe import MoE
from ..layers.rotary import interleaved_to_half
from .config import Llama4Config


class Llama4Attention(GroupedQueryAttention):
    """Attention within a chunk with rotation, or over the whole row without it.

    Most blocks rotate queries and keys and attend within a chunk of the row. The others attend to
    the whole row without rotation; there later queries are scaled up (arXiv:2501.19399).

    Args:
        config: sizes.
        number: number of the block.
        kernels: the implementations.
    """

    def __init__(self, config: Llama4Config, number: int, kernels: Kernels) -> None:
        has_rotary = config.has_rotary(number)
        super().__init__(config, kernels, chunk=config.chunk if has_rotary else None)
        self.has_rotary = has_rotary
        self.norm_eps = config.norm_eps if config.qk_norm else None

    def apply_rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate both and normalise them, or scale the queries by `cos`."""
        if not self.has_rotary:
            return (query * cos).to(query.dtype), key
        # Published weights rotate neighbouring pairs, as complex numbers.
        q_BSHK, k_BSGK = super().apply_rotary(
            interleaved_to_half(query), interleaved_to_half(key), cos, sin
        )
        return self._normalise(q_BSHK), self._normalise(k_BSGK)

    def _normalise(self, x: Tensor) -> Tensor:
        if self.norm_eps is None:
            return x
        # After the rotation and without a learned scale (transformers: Llama4TextL2Norm).
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, x.shape[-1:], eps=self.norm_eps).to(x.dtype)


class Llama4Experts(Experts):
    """Experts that read rows times their weights, instead of being weighted."""

    def compute(self, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return each row as its expert makes it; see `Experts`."""
        # Before a nonlinear function, so the weight is no factor of the output. The product is in
        # fp32, the dtype of the weight, and is rounded once.
        weighted_MD = (rows * weight.unsqueeze(1)).to(rows.dtype)
        return super().compute(weighted_MD, torch.ones_like(weight), offs)


class Llama4MoE(MoE):
    """A layer of experts that read weighted rows, and a shared expert."""

    def make_experts(self, dim: int, kernels: Kernels) -> Experts:
        """Return the experts."""
        return Llama4Experts(dim, self.settings, kernels)


class Llama4(Decoder):
    """Llama 4."""

    config: Llama4Config

    def make_attention(self, number: int, kernels: Kernels) -> nn.Module:
        """Return attention with rotation in a chunk, or attention to the whole row without it."""
        return Llama4Attention(self.config, number, kernels)

    def make_mlp(self, number: int, kernels: Kernels) -> nn.Module:
        """Return a feed-forward layer, or experts that read weighted rows."""
        config = self.config
        if config.experts_of(number) is None:
            return super().make_mlp(number, kernels)
        return Llama4MoE(config.dim, config.moe, config.norm_eps, kernels)

    def tables(
        self,
        positions: Tensor,
        document_ids: Tensor | None,
        cache: KVCache | None,
        max_documents: int | None = None,
    ) -> Sequence[Tables]:
        """Return rotation and mask, or queries' scale and mask, for each block."""
        ids = document_ids
        if ids is not None:
            places = positions
            if places.shape[-1] != ids.shape[-1]:
                # Ranks that share rows have their own positions, and the ids of whole rows.
                places = positions_in_documents(ids)
            # Chunks of a document are told apart as documents are. One number holds both, the chunk
            # in its low half, because the cache keeps one id for each position.
            ids = (ids.long() << 32) | (places // self.config.chunk)
        keys = ids if cache is None else cache.extend(positions.shape[-1], ids)
        near = far = None
        if ids is not None and keys is not None:
            most = max_documents
            if most is not None:  # each full chunk may end one run more
                most += keys.shape[1] // self.config.chunk
            near = self.attention_mask(ids, keys, max_documents=most)
            far = self.attention_mask(ids >> 32, keys >> 32, max_documents=max_documents)
        scale = self._scale(positions)
        # Blocks without rotation take their scale in place of cosine and sine: all blocks are
        # called alike.
        with_rotary, without = (*self.rotation(positions), near), (scale, scale, far)
        blocks = range(self.config.n_layers)
        return [with_rotary if self.config.has_rotary(number) else without for number in blocks]

    def _scale(self, positions: Tensor) -> Tensor:
        """Return what queries at [S] or [B, S] positions are multiplied by, [..., S, 1, 1]."""
        config = self.config
        steps = ((positions + 1) // config.temperature_floor).float()
        scale: Tensor = 1.0 + config.temperature_scale * torch.log1p(steps)
        return scale[..., None, None]


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return each position's distance from the first of its document, [B, S].

    Args:
        document_ids: [B, S]; the positions of a document are neighbours.
    """
    index_BS = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_first_BS = document_ids != document_ids.roll(1, 1)
    return index_BS - (index_BS * is_first_BS).cummax(1).values
