"""What decoders share: an embedding, blocks with a residual stream, and a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.choose import Kernels
from .decoder_config import DecoderConfig, GroupedQueryConfig
from .language_model import BlockCache, Constant, KVCache, LanguageModel, LossFunction, Normal
from .layers.attention import GroupedQueryAttention
from .layers.configs import YarnScaling
from .layers.dense import Embedding, GatedMLP, Linear, RMSNorm
from .layers.moe import MoE, moe_layers
from .layers.rotary import frequencies, rotation, scale_frequencies, yarn


class FurtherTarget(NamedTuple):
    """Labels that a model learns to predict beside the next token.

    Attributes:
        hidden: [B, S, D], hidden states after a norm, which the head's weight is applied to.
        labels: [B, S], as those of `LanguageModel.forward`.
        weight: factor of the loss for these labels.
    """

    hidden: Tensor
    labels: Tensor
    weight: float


class Head(nn.Module):
    """Final norm, and the projection to logits or to the loss.

    Norm, projection and loss are one module, so that FSDP gathers their weights once.

    Args:
        dim: width of the residual stream.
        vocab_size: rows of the projection; None where it uses the embedding's weight.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
    """

    def __init__(self, dim: int, vocab_size: int | None, norm_eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, norm_eps, kernels)
        self.proj = None if vocab_size is None else Linear(dim, vocab_size)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        tied_weight: Tensor | None = None,
        *,
        further_targets: Callable[[Tensor], Iterator[FurtherTarget]] | None = None,
    ) -> Tensor:
        """Return [B, S, V] logits in fp32, or the summed loss if `labels` and `loss` are given.

        Args:
            x: [B, S, D].
            labels: [B, S].
            loss: see `LanguageModel.forward`.
            tied_weight: [V, D], the embedding's weight where there is no projection of its own.
            further_targets: maps the normed hidden states to targets whose losses are added, such
                as those of multi-token prediction.
        """
        weight_VD = tied_weight if self.proj is None else self.proj.local("weight")
        assert weight_VD is not None, "a head without projection needs the embedding's weight"
        x_BSD = self.norm(x)
        if labels is None or loss is None:
            # Cast after the product: what reads the logits sums in fp32.
            return F.linear(x_BSD, weight_VD.to(x_BSD.dtype)).float()
        # Without logits: the loss gets weight and hidden states, and may make logits in pieces.
        total = loss(x_BSD.flatten(0, 1), weight_VD, labels.flatten())
        for target in further_targets(x_BSD) if further_targets else ():
            # In this module, so that sharded weights are still gathered once.
            further = loss(target.hidden.flatten(0, 1), weight_VD, target.labels.flatten())
            total = total + target.weight * further
        return total


Tables = tuple[Tensor, Tensor, Tensor | None]
"""cosine, sine and mask, which a block takes beside the residual stream"""


class Block(nn.Module):
    """Attention and feed-forward layer, each added to the residual stream.

    Args:
        attention: takes [B, S, D], rotation, mask and cache, as `GroupedQueryAttention` does.
        mlp: takes [B, S, D] and token weights, as `MoE` does. Each half has its own norm and
            returns what is added to the residual stream.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: BlockCache | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """Map [B, S, D] to [B, S, D].

        See `MoE` for `token_weights`, and `GroupedQueryAttention` for the rest.
        """
        x_BSD = x + self.attention(x, cos, sin, mask, cache)
        out_BSD: Tensor = x_BSD + self.mlp(x_BSD, token_weights)
        return out_BSD


class Decoder(LanguageModel):
    """Base of all decoders; a family overrides the methods that make its blocks.

    With tied embeddings the only weight of both ends is `embed.weight`.

    Args:
        config: sizes, with the vocabulary settled.
        kernels: the implementations.
    """

    writers: ClassVar[tuple[str, ...]] = (
        "attention.o.weight",
        "mlp.down.weight",
        "mlp.experts.down",
        "mlp.shared.down.weight",
    )
    """endings of the weights that write to the residual stream"""

    def __init__(self, config: DecoderConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.attention_mask = kernels.attention_mask
        self.embed = Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(self.make_block(i, kernels) for i in range(config.num_blocks))
        self.takes_padding = bool(moe_layers(self))
        own_rows = None if config.tie_embeddings else config.vocab
        self.head = Head(config.dim, own_rows, config.norm_eps, kernels)
        # On the CPU also while the module is built on `meta`: arithmetic there imports a compiler.
        values = self.rotary_frequencies(torch.device("cpu"))
        self.register_buffer("frequencies", values, persistent=False)

    def make_block(self, number: int, kernels: Kernels) -> Block:
        """Return block `number`; a family whose blocks have more parts overrides it."""
        return Block(self.make_attention(number, kernels), self.make_mlp(number, kernels))

    def make_attention(self, number: int, kernels: Kernels) -> nn.Module:
        """Return the attention half of block `number`, which is called as in `Block`."""
        raise NotImplementedError

    def make_mlp(self, number: int, kernels: Kernels) -> nn.Module:
        """Return the feed-forward half of block `number`."""
        config, experts = self.config, self.config.experts_of(number)
        if experts is not None:
            return MoE(config.dim, experts, config.norm_eps, kernels)
        return GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels)

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies of the rotary embedding, [K / 2], scaled as the config says."""
        theta, scaling = self.config.rope_theta, self.config.frequency_scaling
        unscaled = frequencies(self.config.rotary_width, theta, device)
        if scaling is None:
            return unscaled
        if isinstance(scaling, YarnScaling):
            return yarn(unscaled, theta, **scaling.blend)
        return scale_frequencies(unscaled, **scaling.model_dump())

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for [S] or [B, S] positions; see `rotary.rotation`."""
        scaling = self.config.frequency_scaling
        scale = 1.0 if scaling is None else scaling.rotation_scale
        return rotation(positions, self.frequencies, scale)

    def tables(
        self, positions: Tensor, document_ids: Tensor | None, cache: KVCache | None
    ) -> Sequence[Tables]:
        """Return rotation and mask for each block, and count the positions into the cache.

        Args:
            positions: [S] or [B, S].
            document_ids: see `LanguageModel.forward`.
            cache: see there.
        """
        keys = document_ids
        if cache is not None:
            keys = cache.extend(positions.shape[-1], document_ids)
        mask = None
        if document_ids is not None and keys is not None:
            mask = self.attention_mask(document_ids, keys)
        return [(*self.rotation(positions), mask)] * self.config.n_layers

    def token_weights(self, padding_mask: Tensor | None) -> Tensor | None:
        """Return what `MoE` takes beside tokens: nothing where there is no padding, or no expert.

        Args:
            padding_mask: see `LanguageModel.forward`.
        """
        if padding_mask is None or not self.takes_padding:
            return None
        is_token_BS = ~padding_mask
        # A row of nothing but padding would divide by zero.
        counts_B1 = is_token_BS.sum(1, keepdim=True).clamp(min=1)
        return self.own_positions(is_token_BS * (is_token_BS.shape[1] / counts_B1.double()))

    def forward(
        self,
        tokens: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
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
        tables = self.tables(positions, document_ids, cache)
        weights = self.token_weights(padding_mask)
        x_BSD = self.embed(tokens).to(self.compute_dtype) if hidden is None else hidden
        for number in range(blocks.start, min(blocks.stop, count)):
            block_cache = None if cache is None else cache.block(number)
            # By name: a stage of a pipeline has some of them alone.
            x_BSD = getattr(self.layers, str(number))(x_BSD, *tables[number], block_cache, weights)
        if blocks.stop <= count:
            return x_BSD
        tied_weight = self.embed.local("weight") if self.config.tie_embeddings else None
        out: Tensor = self.head(x_BSD, labels, loss, tied_weight)
        return out

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts.

        Weights that write to the residual stream start smaller, so that its variance does not grow
        with depth (GPT-2, Radford et al. 2019, section 2.3).
        """
        if name.endswith("norm.weight"):
            return Constant(1.0)
        # Two writes a block, by attention and by the feed-forward layer.
        if name.endswith(self.writers):
            return Normal(self.config.init_std / math.sqrt(2 * self.config.n_layers))
        return Normal(self.config.init_std)

    def init_buffers(self, device: torch.device) -> None:
        """Compute rotary frequencies, the same bits on every device; start balances of experts."""
        self.frequencies = self.rotary_frequencies(torch.device("cpu")).to(device)
        for layer in moe_layers(self).values():
            layer.init_buffers(device)


class GroupedQueryDecoder(Decoder):
    """A decoder of grouped-query attention, and of SwiGLU or experts: Llama 3, Mixtral, Qwen3."""

    config: GroupedQueryConfig

    def make_attention(self, number: int, kernels: Kernels) -> nn.Module:
        """Return the attention half of a block, which is the same for all."""
        return GroupedQueryAttention(self.config, kernels, qk_norm=self.config.has_head_norms)
