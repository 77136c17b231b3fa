"""Batches of encoded texts, whose labels are of texts, of tokens, or of ends of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from ....kernels.ragged.lengths import SampleLengths
from ...data.batch import Batch
from ...data.collate import Collation
from ..collate_texts import collate_texts, collate_tokens, drop_padding
from ..encode_texts import count_tokens


@dataclass(frozen=True)
class TextBatch(Batch):
    """Texts, one a row, padded at the right.

    Attributes:
        tokens: [B, S] int64.
        lengths: [B] int64; the tokens of each text.
        labels: [B] int64 or [B, C] fp32, of texts. None: they are to be predicted.
        padding_mask: [B, S] bool; True at filler. None: the model does not ask.
        context_start: [B] int64; where the context of a question begins.
        answers: [B, L] uint8; the texts that answer a question, see `encode_answer_texts`.
        positions: [B, S] int64; the position of each token in the whole text, where ranks share a
            text. None: they are not.
        is_valid: [B] bool; False for a text that only fills up the last batch of a validation.
            None: all are valid.
        sources: [B] int64, from which source each text is; None: all are from one.
        sample_keys: [B] int64, from which dropout draws; see `make_keys`. None: there is
            no dropout.
    """

    labels_have_positions: ClassVar[bool] = False
    """whether labels are [B, S], one for each token"""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor | None = None
    padding_mask: Tensor | None = None
    context_start: Tensor | None = None
    answers: Tensor | None = None
    positions: Tensor | None = None
    is_valid: Tensor | None = None
    sources: Tensor | None = None
    sample_keys: Tensor | None = None

    @property
    def padding(self) -> Tensor | None:
        """Whether each position is filler."""
        return self.padding_mask

    @property
    def position_of_each(self) -> Tensor:
        """The position of each token in its text, [B, S]."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return a rank's positions; the padding of whole rows stays, which routers need."""
        labels = self.labels
        if labels is not None and self.labels_have_positions:
            labels = take(labels)
        positions = take(self.position_of_each)
        return replace(self, tokens=take(self.tokens), labels=labels, positions=positions)

    def without_padding(self) -> Self:
        """Return the batch without the padding mask."""
        return replace(self, padding_mask=None)


@dataclass(frozen=True)
class WordBatch(TextBatch):
    """Texts whose tokens have labels, [B, S] int64, -100 where none counts."""

    labels_have_positions: ClassVar[bool] = True


@dataclass(frozen=True)
class RaggedTexts(TextBatch):
    """Texts without padding, one after the other: tokens, positions and labels of tokens, [1, T].

    Attributes:
        row_lengths: `lengths`, as the model takes them.
    """

    row_lengths: SampleLengths | None = None

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> Self:
        """Return the batch of some fields that lie on the host."""
        return cls(**columns, row_lengths=SampleLengths(columns["lengths"].tolist()))


def make_collation(task: str, eos_id: int, *, ragged: bool = False) -> Collation:
    """Return how the encoded records of a task become batches.

    Args:
        task: the name of the task.
        eos_id: the token of padding.
        ragged: whether texts stand one after the other, without padding.
    """
    if ragged:
        of_tokens = task == "token_classification"
        collate = partial(collate_tokens if of_tokens else collate_texts, eos_id=eos_id)
        fields = ("tokens", "labels") if of_tokens else ("tokens",)
        flat = partial(drop_padding, collate=collate, fields=fields)
        return Collation(flat, RaggedTexts, count_tokens)
    if task == "token_classification":
        return Collation(partial(collate_tokens, eos_id=eos_id), WordBatch, count_tokens)
    return Collation(partial(collate_texts, eos_id=eos_id), TextBatch, count_tokens)
