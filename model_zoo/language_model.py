"""The contract between a model and the engine: forward pass, cache, loss and initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class BlockCache:
    """The keys and values of one block; memory for `capacity` positions is taken at first use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._held: tuple[Tensor, Tensor] | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, S, G, K] keys and [B, S, G, W] values and return all so far, S = length."""
        # Not before the first keys come: they say the dtype, the device and the number of heads.
        if self._held is None:
            shapes = [(len(x), self.capacity, *x.shape[2:]) for x in (key, value)]
            self._held = key.new_empty(shapes[0]), value.new_empty(shapes[1])
        start, self.length = self.length, self.length + key.shape[1]
        for held, new in zip(self._held, (key, value), strict=True):
            held[:, start : self.length] = new
        keys, values = self._held
        return keys[:, : self.length], values[:, : self.length]


class KVCache:
    """What a model remembers of the positions it has seen.

    Args:
        capacity: positions that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._blocks: dict[int, BlockCache] = {}
        self._document_ids: Tensor | None = None

    def block(self, number: int) -> BlockCache:
        """Return the cache of block `number`."""
        return self._blocks.setdefault(number, BlockCache(self.capacity))

    def extend(self, count: int, document_ids: Tensor | None) -> Tensor | None:
        """Count `count` new positions in, and return the document ids of all, [B, length].

        Document ids are given at every call or at none.
        """
        start, self.length = self.length, self.length + count
        if document_ids is None:
            return None
        if self._document_ids is None:
            self._document_ids = document_ids.new_empty(document_ids.shape[0], self.capacity)
        self._document_ids[:, start : self.length] = document_ids
        return self._document_ids[:, : self.length]


LossFunction = Callable[..., Tensor]
"""(hidden [T, D], head weight [V, D], labels [T], -100 ignored) -> the sum over tokens that is
minimised, fp32. Given a list as `token_losses`, it appends the task's loss of each token to it,
without regularisers and without gradient: [T], in one piece or several."""


class LossRecord:
    """A loss function for one forward pass that keeps the loss of each token.

    A model calls it for its labels first. Later calls are for what the model learns besides, such
    as multi-token prediction: they are minimised, and no part of the task's loss.
    """

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._token_losses: list[Tensor] = []

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the sum that is minimised; see `LanguageModel.forward`."""
        if self._token_losses:
            return self._loss(hidden, weight, labels)
        return self._loss(hidden, weight, labels, token_losses=self._token_losses)

    def sums(self, total: Tensor, sources: Tensor | None = None, num_sources: int = 0) -> Tensor:
        """Return the sum that is minimised, the task's loss, and that by source; without gradient.

        Args:
            total: what the forward pass returned.
            sources: see `Batch`.
            num_sources: number of sources; 0 leaves out the losses by source.

        Returns:
            [2 + num_sources].
        """
        # As the kernel sums: without regularisers both are the same to the bit.
        task = torch.stack([each.sum() for each in self._token_losses]).sum()
        sums = torch.stack([total.detach(), task])
        if sources is None or not num_sources:
            return sums
        rows = torch.cat(self._token_losses).view(len(sources), -1).sum(1)
        return torch.cat([sums, sum_by_source(rows, sources, num_sources)])


def sum_by_source(rows: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Return the sum of each source's rows; what is not finite stays in its own source."""
    # Not a product with the mask: 0 times NaN is NaN, and would reach every source.
    mine = sources == torch.arange(num_sources, device=sources.device).unsqueeze(1)
    return torch.where(mine, rows, 0).sum(1)


@dataclass(frozen=True)
class Normal:
    """Initial values: normal with this standard deviation, cut off at three of them."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values: all the same."""

    value: float


class LanguageModel(nn.Module):
    """A causal language model as one would write it for one device.

    Weights are kept in fp32 (or as loaded); layers cast them to the dtype of their input, and the
    embedding's output is cast to `compute_dtype`, so that this one attribute sets the precision.
    """

    compute_dtype: torch.dtype = torch.float32
    remote_parameters: Mapping[str, tuple[int, ...]] = {}
    """names and shapes of the parameters that other pipeline stages hold instead of this rank"""
    takes_padding: bool = False
    """whether `forward` takes `padding_mask`"""
    own_positions: Callable[[Tensor], Tensor] = staticmethod(lambda whole: whole)
    """maps [B, S] of whole rows to the positions of this rank, where ranks share a sequence"""
    remote_buffers: Mapping[str, tuple[int, ...]] = {}
    """names and shapes of the saved buffers that other pipeline stages hold instead of this rank"""

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
        """Return logits, or the summed loss if `labels` and `loss` are given.

        A model that can be cut into a pipeline's stages also computes some of its blocks alone.

        Args:
            tokens: [B, S] token numbers.
            labels: [B, S] what each position should predict; -100 is not counted.
            loss: (hidden [T, D], head weight [V, D], labels [T]) -> sum over tokens, fp32 scalar.
                It is called for the labels first, then for what else the model learns to predict.
            positions: [B, S] position of each token in its document; default 0..S-1.
            document_ids: [B, S] attention stays inside runs of equal numbers; default: no borders.
            padding_mask: [B, S] bool of whole rows, True at filler, which belongs to no document:
                experts take no such token, and routers do not count it; default: there is none.
            cache: keys and values of earlier positions, extended in place; each stage has its own.
            hidden: [B, S, D] what the blocks before `blocks` made, in place of tokens.
            blocks: which to compute; the number after the last one's is the head; default: all.

        Returns:
            [B, S, V] logits in fp32, or the scalar loss; [B, S, D] hidden states if `blocks` ends
            before the head.
        """
        raise NotImplementedError

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return what is saved with the weights and not trained, by name."""
        # The state dict leaves out the buffers that are not persistent.
        saved = self.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.named_buffers() if name in saved}

    @property
    def remote_state(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the saved parameters and buffers of other pipeline stages."""
        return {**self.remote_parameters, **self.remote_buffers}

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts."""
        raise NotImplementedError

    def init_buffers(self, device: torch.device) -> None:
        """Compute the buffers that are not saved (such as rotary tables) on `device`."""
        raise NotImplementedError
