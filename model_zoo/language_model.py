"""The contract between a language model and the engine: forward pass, cache and loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.ragged.lengths import SampleLengths
from .base import Constant as Constant
from .base import Model
from .base import Normal as Normal


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
"""(hidden [T, D], head weight [V, D], labels [T], -100 ignored) -> the sums that are minimised, a
scalar in fp32 or several, [K]. A model that caps its logits gives the cap as `softcap`."""


class LanguageModel(Model):
    """A causal language model as one would write it for one device.

    Weights are kept in fp32 (or as loaded); layers cast them to the dtype of their input, and the
    embedding's output is cast to `compute_dtype`, so that this one attribute sets the precision.
    """

    autocasts = False

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
            max_documents: a number that the documents of no row exceed, so that attention on a GPU
                needs no mask (see `kernels.attention.varlen.find_documents`); a model may leave
                it out: see `Model.takes_max_documents`.
            padding_mask: [B, S] bool of whole rows, True at filler, which belongs to no document:
                experts take no such token, and routers do not count it; default: there is none.
            lengths: of the samples of a flat row, where B = 1 and S = T: attention and positions
                stay inside a sample; not with document ids, a padding mask or a cache.
            cache: keys and values of earlier positions, extended in place; each stage has its own.
            hidden: [B, S, D] what the blocks before `blocks` made, in place of tokens.
            blocks: which to compute; the number after the last one's is the head; default: all.

        Returns:
            [B, S, V] logits in fp32, or the scalar loss; [B, S, D] hidden states if `blocks` ends
            before the head.
        """
        raise NotImplementedError


def apart_from_padding(document_ids: Tensor | None, padding_mask: Tensor | None) -> Tensor | None:
    """Return document ids, [B, S], in which the filler of a row is a document of its own.

    Not masked out: each query must see a key, and filler sees filler.
    """
    if padding_mask is None:
        return document_ids
    ids = (
        torch.zeros_like(padding_mask, dtype=torch.int32) if document_ids is None else document_ids
    )
    return ids.masked_fill(padding_mask, -1)
