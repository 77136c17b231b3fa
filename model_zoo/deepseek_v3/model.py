"""DeepSeek-V3 (arXiv:2412.19437, section 2), and DeepSeek-V2 (arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ..decoder import Block, Decoder, Prediction
from ..language_model import BlockCache, KVCache, LossFunction
from ..layers.dense import GatedMLP, Linear, RMSNorm
from ..layers.latent_attention import LatentAttention
from ..layers.moe import MoE
from ..layers.rotary import rotation, yarn
from .config import DeepSeekV3Config

IGNORED = -100


class PredictionBlock(Block):
    """One more block, which helps to predict a token that is farther ahead (section 2.2).

    Args:
        block: whose layers it takes.
        dim: width of the residual stream.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
    """

    def __init__(self, block: Block, dim: int, norm_eps: float, kernels: Kernels) -> None:
        super().__init__(block.attention, block.mlp)
        self.embed_norm = RMSNorm(dim, norm_eps, kernels)
        self.hidden_norm = RMSNorm(dim, norm_eps, kernels)
        self.join = Linear(2 * dim, dim)
        self.norm = RMSNorm(dim, norm_eps, kernels)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: BlockCache | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """Return normed hidden states [B, S, D] (equations 21 and 22).

        Args:
            x: [B, S, 2 D]: embeddings of the tokens so far ahead, then what came before this block.
            cos: see `Block`, as for the others.
        """
        embedded_BSD, hidden_BSD = x.chunk(2, dim=-1)
        normed = (self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD))
        joined_BSD = self.join(torch.cat(normed, dim=-1))
        added_BSD = super().forward(joined_BSD, cos, sin, mask, cache, token_weights)
        out_BSD: Tensor = self.norm(added_BSD)
        return out_BSD


class DeepSeekV3(Decoder):
    """DeepSeek-V3: latent attention, experts, and in training predictions farther ahead."""

    config: DeepSeekV3Config

    def block(self, number: int, kernels: Kernels) -> Block:
        """Return a block: the first ones are dense, the last ones predict farther ahead."""
        config = self.config
        attention = LatentAttention(
            config.dim, config.n_heads, config, config.query_scale, config.norm_eps, kernels
        )
        block = Block(attention, self._mlp(number, kernels))
        if number < config.n_layers:
            return block
        return PredictionBlock(block, config.dim, config.norm_eps, kernels)

    def _mlp(self, number: int, kernels: Kernels) -> nn.Module:
        config = self.config
        if config.is_dense(number):
            return GatedMLP(config.dim, config.ffn_dim, config.norm_eps, kernels)
        return MoE(config.dim, config.moe, config.norm_eps, kernels)

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies, stretched where the config says so."""
        found, config = super().rotary_frequencies(device), self.config
        if config.rope_scaling is None:
            return found
        return yarn(found, config.rope_theta, **config.rope_scaling.blend)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what turns queries and keys."""
        scaling = self.config.rope_scaling
        scale = 1.0 if scaling is None else scaling.rotation_scale
        return rotation(positions, self.frequencies, scale)

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
        """Return logits, the summed loss, or hidden states: see `LanguageModel`.

        In training the loss includes the predictions farther ahead.
        """
        count, ends = self.config.n_layers, blocks is None or blocks.stop > self.config.n_layers
        is_ahead = self.training and ends and self.config.mtp_depth and loss is not None
        before = super().forward(
            tokens,
            labels=labels,
            loss=loss,
            positions=positions,
            document_ids=document_ids,
            padding_mask=padding_mask,
            cache=cache,
            hidden=hidden,
            blocks=range(count) if is_ahead else blocks,
        )
        if not is_ahead:
            return before
        assert tokens is not None, "a loss farther ahead needs the tokens"
        assert labels is not None, "a loss needs labels"
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        ahead = partial(self._ahead, tokens, labels, positions, document_ids, padding_mask)
        tied_weight = self.embed.local("weight") if self.config.tie_embeddings else None
        out: Tensor = self.head(before, labels, loss, tied_weight, ahead=ahead)
        return out

    def _ahead(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        document_ids: Tensor | None,
        padding_mask: Tensor | None,
        hidden_BSD: Tensor,
    ) -> Iterator[Prediction]:
        """Yield what predicts the tokens 2, 3, ... ahead of each position (section 2.2).

        Where a row or document ends before that token, there is nothing to predict.
        """
        config = self.config
        cos, sin = self.rotation(positions)
        mask = None if document_ids is None else self.attention_mask(document_ids, document_ids)
        for depth in range(1, config.mtp_depth + 1):
            embedded_BSD = self.embed(_shifted(tokens, depth, 0)).to(self.compute_dtype)
            x_BS2D = torch.cat((embedded_BSD, hidden_BSD), dim=-1)
            block = getattr(self.layers, str(config.n_layers + depth - 1))
            is_filler = padding_mask
            if is_filler is not None:  # what looks ahead at filler is none of a document's tokens
                is_filler = is_filler | _shifted(is_filler, depth, False)
            hidden_BSD = block(x_BS2D, cos, sin, mask, None, self.token_weights(is_filler))
            targets_BS = _shifted(labels, depth, IGNORED)
            if document_ids is not None:
                same = _shifted(document_ids, depth, -1) == document_ids
                targets_BS = targets_BS.where(same, IGNORED)
            yield Prediction(hidden_BSD, targets_BS, config.mtp_weight / config.mtp_depth)


def _shifted(x_BS: Tensor, count: int, fill: int) -> Tensor:
    """Return what stands `count` positions later; `fill` where the row ends before."""
    return F.pad(x_BS[:, count:], (0, min(count, x_BS.shape[1])), value=fill)
