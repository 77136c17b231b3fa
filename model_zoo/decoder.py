"""What decoders share: an embedding, blocks with a residual stream, and a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..kernels.attention.local import Mask
from ..kernels.choose import Kernels
from ..kernels.ragged.lengths import SampleLengths
from ..kernels.ragged.samples import positions_in_samples
from ..kernels.summation import widen
from .base import Constant, Normal
from .decoder_config import DecoderConfig
from .grouped_query_config import GroupedQueryConfig
from .language_model import BlockCache, KVCache, LanguageModel, LossFunction, apart_from_padding
from .layers.attention import GroupedQueryAttention
from .layers.dense import AdaptedLinear, Embedding, GatedMLP
from .layers.head import ClassificationHead, Head
from .layers.moe import MoE, moe_layers
from .layers.rope_scaling import LinearScaling, LongRopeScaling, YarnScaling
from .layers.rotary import frequencies, rotation, scale_frequencies, yarn
from .layers.router import SampleTokens, TokenWeights

Tables = tuple[Tensor, Tensor, Mask]
"""cosine, sine and mask, which a block takes beside the residual stream"""


class Block(nn.Module):
    """Attention and feed-forward layer, each added to the residual stream.

    Args:
        attention: takes [B, S, D], rotation, mask and cache, as `GroupedQueryAttention` does.
        mlp: takes [B, S, D] and token weights, as `MoE` does. Each half has its own norm and
            returns what is added to the residual stream.

    Attributes:
        dropping: the layers with an adapter whose input is dropped in training.
        sets_keys: whether `forward` gives these layers their keys, and not what calls it.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.dropping: tuple[AdaptedLinear, ...] = ()
        self.sets_keys = True

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask = None,
        cache: BlockCache | None = None,
        token_weights: TokenWeights = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Map [B, S, D] to [B, S, D].

        See `MoE` for `token_weights`, `AdaptedLinear` for `dropout_keys`, and
        `GroupedQueryAttention` for the rest.
        """
        # Here and not in the model: a block that is recomputed gets the keys of its micro batch.
        for layer in self.dropping if self.sets_keys else ():
            layer.dropout_keys = dropout_keys
        x_BSD = self.attend(x, cos, sin, mask, cache)
        out_BSD: Tensor = x_BSD + self.mlp(x_BSD, token_weights)
        return out_BSD

    def attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: BlockCache | None
    ) -> Tensor:
        """Add what attention makes of [B, S, D] to the residual stream; see `forward`."""
        out_BSD: Tensor = x + self.attention(x, cos, sin, mask, cache)
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
        if config.is_bidirectional:
            kernels = kernels.in_both_directions()
        if config.has_zero_centered_norms:
            kernels = kernels.with_zero_centered_norms()
        if config.has_geglu:
            kernels = kernels.with_geglu()
        self.attention_mask = kernels.attention_mask
        self.takes_max_documents = getattr(config, "score_softcap", None) is None  # see `Model`
        self.embed = Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(self.make_block(i, kernels) for i in range(config.num_blocks))
        self.has_experts = bool(moe_layers(self))
        # Filler stands behind all tokens, where causal attention does not see it.
        self.takes_padding = self.has_experts or config.is_bidirectional
        self.head = self.make_head(kernels)
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
        return GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels, config.norms)

    def make_head(self, kernels: Kernels) -> Head | ClassificationHead:
        """Return the language head, or the head of another task."""
        config = self.config
        if config.task_head is not None:
            return ClassificationHead(config.dim, config.task_head, config.norm_eps, kernels)
        own_rows = None if config.is_tied else config.vocab
        return Head(config.dim, own_rows, config.norm_eps, kernels, config.head_softcap)

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies of the rotary embedding, [K / 2], scaled as the config says."""
        theta, scaling = self.config.rope_theta, self.config.frequency_scaling
        if isinstance(scaling, LongRopeScaling):
            factors = scaling.long_factor if scaling.use_long else scaling.short_factor
            return frequencies(self.config.rotary_width, theta, device, factors)
        unscaled = frequencies(self.config.rotary_width, theta, device)
        if scaling is None:
            return unscaled
        if isinstance(scaling, LinearScaling):
            return unscaled / scaling.factor
        if isinstance(scaling, YarnScaling):
            return yarn(unscaled, theta, **scaling.blend)
        return scale_frequencies(unscaled, **scaling.model_dump())

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for [S] or [B, S] positions; see `rotary.rotation`."""
        scaling = self.config.frequency_scaling
        scale = 1.0 if scaling is None else scaling.rotation_scale
        return rotation(positions, self.frequencies, scale)

    def tables(
        self,
        positions: Tensor,
        document_ids: Tensor | None,
        cache: KVCache | None,
        max_documents: int | None = None,
    ) -> Sequence[Tables]:
        """Return rotation and mask for each block, and count the positions into the cache.

        Args:
            positions: [S] or [B, S].
            document_ids: see `LanguageModel.forward`.
            cache: see there.
            max_documents: see there.
        """
        keys = document_ids
        if cache is not None:
            keys = cache.extend(positions.shape[-1], document_ids)
        mask = None
        if document_ids is not None and keys is not None:
            mask = self.attention_mask(document_ids, keys, max_documents=max_documents)
        return [(*self.rotation(positions), mask)] * self.config.n_layers

    def embed_tokens(self, tokens: Tensor | None) -> Tensor:
        """Return the residual stream that tokens [B, S] start, [B, S, D]."""
        x_BSD: Tensor = self.embed(tokens).to(self.compute_dtype)
        if self.config.embed_scale == 1.0:
            return x_BSD
        # Rounded to the compute dtype first, as in the code that models were trained with.
        return x_BSD * torch.tensor(self.config.embed_scale, dtype=x_BSD.dtype, device="cpu")

    def token_weights(
        self, padding_mask: Tensor | None, lengths: SampleLengths | None = None
    ) -> TokenWeights:
        """Return what `MoE` takes beside tokens: nothing where there is no padding, or no expert.

        Args:
            padding_mask, lengths: see `LanguageModel.forward`.
        """
        if lengths is not None:
            return SampleTokens(lengths, padding_mask) if self.has_experts else None
        if padding_mask is None or not self.has_experts:
            return None
        is_token_BS = ~padding_mask
        counts_B1 = is_token_BS.sum(1, keepdim=True).clamp(min=1)  # 0 in a row of padding alone
        return self.own_positions(is_token_BS * (is_token_BS.shape[1] / widen(counts_B1)))

    def forward(
        self,
        tokens: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        max_documents: int | None = None,
        padding_mask: Tensor | None = None,
        lengths: SampleLengths | None = None,
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
        blocks: range | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Return logits, the summed loss, or hidden states: see `LanguageModel`.

        With a task's head the logits are [B, S, outputs], and `loss` takes them alone.

        Args:
            dropout_keys: [B, S] int64, for a head or adapters with dropout; see `dropout.drop`.
        """
        count = self.config.n_layers
        blocks = range(count + 1) if blocks is None else blocks
        if positions is None and lengths is not None:
            positions = positions_in_samples(lengths).unsqueeze(0)
        elif positions is None:
            assert tokens is not None, "positions go with hidden states"
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if self.config.is_bidirectional:
            assert cache is None, "bidirectional attention generates nothing"
            mask = None if lengths is not None else padding_mask  # lengths tell samples apart
            document_ids = apart_from_padding(document_ids, mask)
            if max_documents is not None and mask is not None:
                max_documents += 1  # the filler at the end of a row
        tables = self.tables(positions, document_ids, cache, max_documents)
        if lengths is not None:
            tables = [(cos, sin, lengths) for cos, sin, _ in tables]
        weights = self.token_weights(padding_mask, lengths)
        x_BSD = self.embed_tokens(tokens) if hidden is None else hidden
        for number in range(blocks.start, min(blocks.stop, count)):
            block_cache = None if cache is None else cache.block(number)
            # By name: a stage of a pipeline has some of them alone.
            block = getattr(self.layers, str(number))
            keys = {"dropout_keys": dropout_keys} if getattr(block, "dropping", ()) else {}
            x_BSD = block(x_BSD, *tables[number], block_cache, weights, **keys)
        if blocks.stop <= count:
            return x_BSD
        if isinstance(self.head, ClassificationHead):
            outputs: Tensor = self.head(x_BSD, loss, dropout_keys)
            return outputs
        tied_weight = self.embed.local("weight") if self.config.is_tied else None
        out: Tensor = self.head(x_BSD, labels, loss, tied_weight)
        return out

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts.

        Weights that write to the residual stream start smaller, so that its variance does not grow
        with depth (GPT-2, Radford et al. 2019, section 2.3).
        """
        if name.endswith("norm.weight"):
            return Constant(0.0 if self.config.has_zero_centered_norms else 1.0)
        if name.endswith("bias"):
            return Constant(0.0)
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
    """A decoder of grouped-query attention, and of SwiGLU or experts."""

    config: GroupedQueryConfig

    def make_attention(self, number: int, kernels: Kernels) -> nn.Module:
        """Return the attention half of block `number`, which may see a window of the row."""
        return GroupedQueryAttention(self.config, kernels, window=self.config.window_of(number))
