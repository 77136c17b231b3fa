"""Batches of pairs of answers: each sample is two rows, the chosen answer and the rejected one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.ragged.lengths import SampleLengths
from ...data.batch import Batch
from ...data.collate import Arrays, Collation, Sample
from ..collate_texts import collate_answers, drop_padding
from ..encode_answers import count_answer_tokens, truncate_preference


@dataclass(frozen=True)
class PairBatch(Batch):
    """Prompts with answers, padded at the right; rows 2 i and 2 i + 1 are a pair.

    Attributes:
        tokens: [2 B, S] int64.
        labels: [2 B, S] int64; the token that follows if it is the answer's, else -100.
        padding_mask: [2 B, S] bool; True at filler. None: the model does not ask.
        positions: [2 B, S] int64; the position of each token in the whole row, where ranks share
            a row. None: they are not shared.
        is_valid: [2 B] bool; False for a row that only fills up the last batch of a validation.
            None: all are valid.
        sources: [2 B] int64, from which source each row is; None: all are from one.
        other_tokens: [2 B, S] int64; each prompt with an answer to the prompt of another sample.
            None: the criterion does not ask.
        other_labels: [2 B, S] int64; the labels of `other_tokens`.
        lengths: [2 B] int64; how many tokens each row has. None: the task does not ask.
        reference: [2 B] log-probability of each answer under the reference model. None: there is
            none, or it is not computed yet.
        reference_point: [2 B]; the same number in each row, what rewards are compared with; see
            `kto_reference_point`.
        sample_keys: [2 B] int64, from which dropout draws, the same of both rows of a pair. None:
            there is no dropout.
        is_single: [rows] bool; where records to predict have one answer, which rows are such ones
            and no part of a pair. None: all rows are of pairs.
    """

    rows_per_sample: ClassVar[int] = 2

    tokens: Tensor
    labels: Tensor
    padding_mask: Tensor | None = None
    positions: Tensor | None = None
    is_valid: Tensor | None = None
    sources: Tensor | None = None
    other_tokens: Tensor | None = None
    other_labels: Tensor | None = None
    lengths: Tensor | None = None
    reference: Tensor | None = None
    reference_point: Tensor | None = None
    sample_keys: Tensor | None = None
    is_single: Tensor | None = None

    @property
    def padding(self) -> Tensor | None:
        """Whether each position is filler."""
        return self.padding_mask

    @property
    def valid_pairs(self) -> Tensor:
        """Whether each pair counts, [B] bool."""
        if self.is_valid is None:
            return torch.ones(len(self), dtype=torch.bool, device=self.tokens.device)
        return self.is_valid[::2]

    @property
    def position_of_each(self) -> Tensor:
        """The position of each token in its row, [2 B, S]."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    @property
    def is_last(self) -> Tensor:
        """Where each row has its last token, [2 B, S]; nowhere if another rank has it."""
        assert self.lengths is not None, "the task asked for them"
        return self.position_of_each == self.lengths.unsqueeze(1) - 1

    @property
    def mismatched(self) -> Self:
        """The prompts with answers to other prompts."""
        assert self.other_tokens is not None, "the criterion asked for them"
        assert self.other_labels is not None, "the criterion asked for them"
        # Padding may differ: it is not told apart from tokens here, which come after the answer.
        return replace(self, tokens=self.other_tokens, labels=self.other_labels, padding_mask=None)

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return a rank's positions; the padding of whole rows stays, which routers need."""
        names = ("tokens", "labels", "other_tokens", "other_labels")
        columns = {name: getattr(self, name) for name in names}
        mine = {name: take(column) for name, column in columns.items() if column is not None}
        return replace(self, positions=take(self.position_of_each), **mine)

    def without_padding(self) -> Self:
        """Return the batch without the padding mask."""
        return replace(self, padding_mask=None)


@dataclass(frozen=True)
class RaggedPairs(PairBatch):
    """Pairs without padding, the rows one after the other: fields of all positions are [1, T].

    Attributes:
        row_lengths: `lengths`, as the model takes them.
        other_lengths: those of the rows of `other_tokens`.
    """

    row_lengths: SampleLengths | None = None
    other_lengths: SampleLengths | None = None

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> Self:
        """Return the batch of some fields that lie on the host."""
        fields: dict[str, Any] = dict(columns)
        if (others := fields.pop("other_lengths", None)) is not None:
            fields["other_lengths"] = SampleLengths(others.tolist())
        return cls(**fields, row_lengths=SampleLengths(columns["lengths"].tolist()))

    def lengths_of(self, name: str) -> SampleLengths | None:
        """Return the lengths of the rows of a field."""
        return self.other_lengths if name.startswith("other_") else self.row_lengths

    @property
    def mismatched(self) -> Self:
        """The prompts with answers to other prompts."""
        # Positions follow from the lengths.
        return replace(super().mismatched, positions=None, row_lengths=self.other_lengths)


def make_example(pairs: int, size: int, *, with_mismatches: bool, ragged: bool) -> PairBatch:
    """Return pairs of token 0, each row of `size` positions; see `make_collation`."""
    names = ["tokens", "labels"]
    names += ["other_tokens", "other_labels"] if with_mismatches else []
    shape = (1, 2 * pairs * size) if ragged else (2 * pairs, size)
    columns: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
    columns["lengths"] = torch.full((2 * pairs,), size)
    if not ragged:
        return PairBatch(**columns, padding_mask=torch.zeros(shape, dtype=torch.bool))
    # From numbers of the host: a simulation has no values in tensors.
    lengths = SampleLengths([size] * 2 * pairs)
    others = lengths if with_mismatches else None
    return RaggedPairs(**columns, row_lengths=lengths, other_lengths=others)


def make_collation(eos_id: int, *, with_mismatches: bool, ragged: bool = False) -> Collation:
    """Return how encoded pairs become batches.

    Args:
        eos_id: the token of padding.
        with_mismatches: add each prompt with the answers to its partner's prompt.
        ragged: whether rows stand one after the other, without padding.
    """
    batch_class = RaggedPairs if ragged else PairBatch
    collate = partial(collate_answers, eos_id=eos_id)
    if ragged:
        collate = partial(drop_padding, collate=collate, fields=("tokens", "labels"))
    if with_mismatches:
        collate = partial(collate_with_mismatches, collate=collate)
        return Collation(collate, batch_class, count_longer, add_partner=add_other_answers)
    return Collation(collate, batch_class, count_answer_tokens)


def add_other_answers(sample: Sample, partner: Sample) -> Sample:
    """Return a sample with the answers to its partner's prompt."""
    return {**sample, "other_chosen": partner["chosen"], "other_rejected": partner["rejected"]}


def collate_with_mismatches(
    samples: Sequence[Sample], length: int, collate: Callable[[Sequence[Sample], int], Arrays]
) -> Arrays:
    """Return the arrays of pairs, and of prompts with answers to their partners' prompts.

    Args:
        samples: the samples.
        length: the number of positions of a row.
        collate: makes the arrays of pairs; see `collate_answers`.
    """
    others = []
    for sample in samples:
        mixed = _mismatch(sample)
        is_long = count_answer_tokens(mixed) > length
        others.append(truncate_preference(mixed, length) if is_long else mixed)
    mismatched = collate(others, length)
    is_ragged = "padding_mask" not in mismatched
    names = ["tokens", "labels", *["lengths"] * is_ragged]
    return collate(samples, length) | {f"other_{name}": mismatched[name] for name in names}


def count_longer(sample: Sample) -> int:
    """Return the length of the prompt with the longest of its own answers and its partner's."""
    return max(count_answer_tokens(sample), count_answer_tokens(_mismatch(sample)))


def _mismatch(sample: Sample) -> dict[str, NDArray[Any]]:
    names = {"prompt": "prompt", "chosen": "other_chosen", "rejected": "other_rejected"}
    return {name: np.asarray(sample[field]) for name, field in names.items()}
