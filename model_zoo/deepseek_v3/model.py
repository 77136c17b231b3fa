"""DeepSeek-V3 (arXiv:2412.19437, section 2), and DeepSeek-V2 (arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ...kernels.attention.local import Mask
from ...kernels.choose import Kernels
from ...kernels.ragged.lengths import SampleLengths
from ...kernels.ragged.samples import positions_in_samples
from ..base import shift
from ..decoder import Block, Decoder
from ..language_model import BlockCache, KVCache, LossFunction
from ..layers.dense import Linear, RMSNorm
from ..layers.head import FurtherTarget
from ..layers.latent_attention import LatentAttention
from ..layers.router import TokenWeights
from .config import DeepSeekV3Config

IGNORED = -100


class PredictionBlock(Block):
    """One more block, for multi-token prediction (section 2.2).

    Args:
        block: the block whose attention and feed-forward layer this block takes over.
        dim: width of the residual stream.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
    """

    def __init__(self, block: Block, dim: int, norm_eps: float, kernels: Kernels) -> None:
        super().__init__(block.attention, block.mlp)
        self.embed_norm = RMSNorm(dim, norm_eps, kernels)
        self.hidden_norm = RMSNorm(dim, norm_eps, kernels)
        self.join = Linear(2 * dim, dim)
        # Depths share the head's projection, but not its norm (published as `shared_head.norm`).
        self.norm = RMSNorm(dim, norm_eps, kernels)

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
        """Return normed hidden states [B, S, D] (equations 21 and 22).

        Args:
            x: [B, S, 2 D]: embeddings of further tokens, then the hidden states before this block.
            cos: see `Block`, as for the others.
        """
        embedded_BSD, hidden_BSD = x.chunk(2, dim=-1)
        # Equation 21 has the hidden states first; the published `eh_proj` takes the embedding
        # first.
        normed = (self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD))
        joined_BSD = self.join(torch.cat(normed, dim=-1))
        added_BSD = super().forward(joined_BSD, cos, sin, mask, cache, token_weights, dropout_keys)
        out_BSD: Tensor = self.norm(added_BSD)
        return out_BSD


class DeepSeekV3(Decoder):
    """DeepSeek-V3: latent attention, experts, and multi-token prediction in training."""

    config: DeepSeekV3Config

    def make_block(self, number: int, kernels: Kernels) -> Block:
        """Return a block; those after the last layer predict further tokens."""
        config, block = self.config, super().make_block(number, kernels)
        if number < config.n_layers:
            return block
        further = PredictionBlock(block, config.dim, config.norm_eps, kernels)
        return further.requires_grad_(number < config.trained_blocks)

    def make_attention(self, number: int, kernels: Kernels) -> nn.Module:
        """Return latent attention."""
        config = self.config
        return LatentAttention(
            config.dim, config.n_heads, config, config.query_scale, config.norm_eps, kernels
        )

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
        """Return logits, the summed loss, or hidden states: see `Decoder`.

        In training the loss of a language head includes multi-token prediction.
        """
        count, ends = self.config.n_layers, blocks is None or blocks.stop > self.config.n_layers
        predicts_further = (
            self.training and ends and self.config.trained_predictions and loss is not None
        )
        before = super().forward(
            tokens,
            labels=labels,
            loss=loss,
            positions=positions,
            document_ids=document_ids,
            max_documents=max_documents,
            padding_mask=padding_mask,
            lengths=lengths,
            cache=cache,
            hidden=hidden,
            blocks=range(blocks.start if blocks else 0, count) if predicts_further else blocks,
            dropout_keys=dropout_keys,
        )
        if not predicts_further:
            return before
        assert tokens is not None, "multi-token prediction needs the tokens"
        assert labels is not None, "a loss needs labels"
        if positions is None and lengths is not None:
            positions = positions_in_samples(lengths).unsqueeze(0)
        elif positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        # A function, and not the targets: they are computed inside the head, from its norm's
        # output.
        targets = partial(
            self._further_targets,
            *(tokens, labels, positions, document_ids, max_documents, padding_mask, lengths),
            dropout_keys,
        )
        tied_weight = self.embed.local("weight") if self.config.is_tied else None
        out: Tensor = self.head(before, labels, loss, tied_weight, further_targets=targets)
        return out

    def _further_targets(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        document_ids: Tensor | None,
        max_documents: int | None,
        padding_mask: Tensor | None,
        lengths: SampleLengths | None,
        dropout_keys: Tensor | None,
        hidden_BSD: Tensor,
    ) -> Iterator[FurtherTarget]:
        """Yield hidden states and labels of tokens 2, 3, ... after each position (section 2.2).

        Where a row or document ends before that token, there is nothing to predict.
        """
        config = self.config
        cos, sin = self.rotation(positions)
        mask: Mask = lengths
        if document_ids is not None:
            mask = self.attention_mask(document_ids, document_ids, max_documents=max_documents)
        if lengths is not None:
            # Samples of a flat row end as documents do.
            document_ids = lengths.numbers.unsqueeze(0)
        for depth in range(1, config.mtp_depth + 1):
            # Any token will do past the end of a row: those positions have no target.
            embedded_BSD = self.embed(self.shift(tokens, depth, 0, None)).to(self.compute_dtype)
            x_BS2D = torch.cat((embedded_BSD, self.own_hidden(hidden_BSD)), dim=-1)
            block = getattr(self.layers, str(config.n_layers + depth - 1))
            is_padding = padding_mask
            if is_padding is not None:  # a position whose further token is padding predicts nothing
                is_padding = is_padding | shift(is_padding, depth, 0)
            elif lengths is not None and document_ids is not None:
                is_padding = shift(document_ids, depth, -1) != document_ids
            weights = self.token_weights(is_padding, lengths)
            hidden_BSD = block(x_BS2D, cos, sin, mask, None, weights, dropout_keys)
            targets_BS = self.shift(labels, depth, IGNORED, document_ids)
            # Equation 25: the weight is for the mean over depths.
            yield FurtherTarget(hidden_BSD, targets_BS, config.mtp_weight / config.mtp_depth)
