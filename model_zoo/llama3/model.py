"""Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ..language_model import Constant, LanguageModel, LossFunction, Normal
from ..layers.attention import GroupedQueryAttention
from ..layers.cache import BlockCache, KVCache
from ..layers.head import Head
from ..layers.mlp import GatedMLP
from ..layers.rotary import frequencies, rotation, stretch
from .config import Llama3Config


class Block(nn.Module):
    """Attention and feed-forward layer, each added to the residual stream."""

    def __init__(self, config: Llama3Config, kernels: Kernels) -> None:
        super().__init__()
        self.attention = GroupedQueryAttention(
            config.dim,
            config.n_heads,
            config.n_kv_heads,
            config.head_width,
            config.norm_eps,
            kernels,
        )
        self.mlp = GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """Map [B, S, D] to [B, S, D]; see `GroupedQueryAttention` for the rest."""
        x_BSD = x + self.attention(x, cos, sin, mask, cache)
        out_BSD: Tensor = x_BSD + self.mlp(x_BSD)
        return out_BSD


class Llama3(LanguageModel):
    """Llama 3. With tied embeddings the only weight of both ends is `embed.weight`.

    Args:
        config: sizes, with the vocabulary settled.
        kernels: the implementations.
    """

    def __init__(self, config: Llama3Config, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.attention_mask = kernels.attention_mask
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, kernels) for _ in range(config.n_layers))
        own_rows = None if config.tie_embeddings else config.vocab
        self.head = Head(config.dim, own_rows, config.norm_eps, kernels)
        self.register_buffer("frequencies", self._frequencies(), persistent=False)

    def forward(
        self,
        tokens: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """Return logits, the summed loss, or hidden states: see `LanguageModel`."""
        count = self.config.n_layers
        blocks = range(count + 1) if blocks is None else blocks
        if positions is None:
            assert tokens is not None, "positions go with hidden states"
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        cos, sin = rotation(positions, self.frequencies)
        keys = document_ids
        if cache is not None:
            keys = cache.extend(positions.shape[-1], document_ids)
        mask = None
        if document_ids is not None and keys is not None:
            mask = self.attention_mask(document_ids, keys)
        x_BSD = self.embed(tokens).to(self.compute_dtype) if hidden is None else hidden
        for number in range(blocks.start, min(blocks.stop, count)):
            block_cache = None if cache is None else cache.block(number)
            # By name: a stage of a pipeline has some of them alone.
            x_BSD = getattr(self.layers, str(number))(x_BSD, cos, sin, mask, block_cache)
        if blocks.stop <= count:
            return x_BSD
        tied_weight = self.embed.weight if self.config.tie_embeddings else None
        out: Tensor = self.head(x_BSD, labels, loss, tied_weight)
        return out

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts.

        Weights that write to the residual stream start smaller, so that its variance does not grow
        with depth (GPT-2, Radford et al. 2019, section 2.3).
        """
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            return Normal(self.config.init_std / math.sqrt(2 * self.config.n_layers))
        return Normal(self.config.init_std)

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies; the same bits on every device."""
        self.frequencies = self._frequencies().to(device)

    def _frequencies(self) -> Tensor:
        # On the CPU also while the module is built on `meta`: arithmetic there imports a compiler.
        found = frequencies(self.config.head_width, self.config.rope_theta, torch.device("cpu"))
        scaling = self.config.rope_scaling
        return found if scaling is None else stretch(found, **scaling.model_dump())
