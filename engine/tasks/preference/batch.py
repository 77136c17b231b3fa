"""Batches of pairs of answers: each sample is two rows, the chosen answer and the rejected one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.batch import Batch
from ...data.collate import Arrays, Collation, Sample
from ..collate_texts import collate_answers
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
        ends: [2 B] int64; how many tokens each row has. None: the task does not ask.
        reference: [2 B] log-probability of each answer under the reference model. None: there is
            none, or it is not computed yet.
        reference_point: [2 B]; the same number in each row, what rewards are compared with; see
            `kto_reference_point`.
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
    ends: Tensor | None = None
    reference: Tensor | None = None
    reference_point: Tensor | None = None

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
    def is_last(self) -> Tensor:
        """Where each row has its last token, [2 B, S]; nowhere if another rank has it."""
        assert self.ends is not None, "the task asked for them"
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return positions == self.ends.unsqueeze(1) - 1

    @property
    def mismatched(self) -> Self:
        """The prompts with answers to other prompts."""
        assert self.other_tokens is not None, "the criterion asked for them"
        assert self.other_labels is not None, "the criterion asked for them"
        # Padding may differ: it is not told apart from tokens here, which come after the answer.
        return replace(self, tokens=self.other_tokens, labels=self.other_labels, padding_mask=None)

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return a rank's positions; the padding of whole rows stays, which routers need."""
        positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        names = ("tokens", "labels", "other_tokens", "other_labels")
        columns = {name: getattr(self, name) for name in names}
        mine = {name: take(column) for name, column in columns.items() if column is not None}
        return replace(self, positions=take(positions), **mine)

    def without_padding(self) -> Self:
        """Return the batch without the padding mask."""
        return replace(self, padding_mask=None)


def make_collation(eos_id: int, *, with_mismatches: bool) -> Collation:
    """Return how encoded pairs become batches.

    Args:
        eos_id: the token of padding.
        with_mismatches: add each prompt with the answers to its partner's prompt.
    """
    if with_mismatches:
        collate = partial(collate_with_mismatches, eos_id=eos_id)
        return Collation(collate, PairBatch, count_longer, add_partner=add_other_answers)
    return Collation(partial(collate_pairs, eos_id=eos_id), PairBatch, count_answer_tokens)


def collate_pairs(samples: Sequence[Sample], length: int, eos_id: int) -> Arrays:
    """Return the arrays of pairs; see `collate_answers`."""
    arrays = collate_answers(samples, length, eos_id)
    # A field of this name would be that of rows without padding.
    arrays["ends"] = arrays.pop("lengths")
    return arrays


def add_other_answers(sample: Sample, partner: Sample) -> Sample:
    """Return a sample with the answers to its partner's prompt."""
    return {**sample, "other_chosen": partner["chosen"], "other_rejected": partner["rejected"]}


def collate_with_mismatches(samples: Sequence[Sample], length: int, eos_id: int) -> Arrays:
    """Return the arrays of pairs, and of prompts with answers to their partners' prompts."""
    others = []
    for sample in samples:
        mixed = _mismatch(sample)
        is_long = count_answer_tokens(mixed) > length
        others.append(truncate_preference(mixed, length) if is_long else mixed)
    mismatched = collate_pairs(others, length, eos_id)
    return collate_pairs(samples, length, eos_id) | {
        "other_tokens": mismatched["tokens"],
        "other_labels": mismatched["labels"],
    }


def count_longer(sample: Sample) -> int:
    """Return the length of the prompt with the longest of its own answers and its partner's."""
    return max(count_answer_tokens(sample), count_answer_tokens(_mismatch(sample)))


def _mismatch(sample: Sample) -> dict[str, NDArray[Any]]:
    names = {"prompt": "prompt", "chosen": "other_chosen", "rejected": "other_rejected"}
    return {name: np.asarray(sample[field]) for name, field in names.items()}
