"""A micro batch of samples: the base of every task's batch, and the batch of a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...kernels.ragged.lengths import SampleLengths
from ...kernels.ragged.samples import sum_by_sample

IGNORED = -100
"""the label of a position that does not count in the loss"""


@dataclass(frozen=True)
class Batch:
    """A micro batch; a task derives its own, whose fields are tensors with rows along dimension 0.

    A field that a batch does not need is None. Where rows have unequal lengths and no padding, a
    field `row_lengths` tells them, and a field with a value for each position is flat: [1, T], or
    [T, ...] in samples of a plugin.
    """

    rows_per_sample: ClassVar[int] = 1
    """rows of each field that belong to one sample, one after the other"""

    def __len__(self) -> int:
        """Return the number of samples."""
        rows = self.ragged or next(iter(self.columns().values()))
        return len(rows) // self.rows_per_sample

    @property
    def ragged(self) -> SampleLengths | None:
        """The lengths of rows that stand one after the other; None where rows have one length."""
        return getattr(self, "row_lengths", None)

    def lengths_of(self, name: str) -> SampleLengths | None:
        """Return the lengths that a field with a value for each position has; see `ragged`."""
        return self.ragged

    def sum_rows(self, values: Tensor) -> Tensor:
        """Return the sum of each row, of a value for each position."""
        if self.ragged:
            return sum_by_sample(values.flatten(), self.ragged)
        return values.view(len(next(iter(self.columns().values()))), -1).sum(1)

    @property
    def padding(self) -> Tensor | None:
        """Whether each position is filler, [B, S] bool; None where nothing is, or nothing asks."""
        return None

    def columns(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if isinstance(column, Tensor)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> Self:
        """Return the batch of some fields; the inverse of `columns`."""
        return cls(**columns)

    def to(self, device: torch.device) -> Self:
        """Copy the batch to a device; to a GPU through pinned memory, without waiting."""
        if device.type == "cuda":
            # From pageable memory the host would wait for the copy. torch keeps the pinned memory
            # until the copy has ended.
            moved = self._each(lambda _, x: x.pin_memory().to(device, non_blocking=True))
        else:
            moved = self._each(lambda _, x: x.to(device))
        return moved._each_length(lambda lengths: lengths.to(device))

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """Return the batch with its floating-point fields in a dtype."""
        return self._each(lambda _, x: x.to(dtype) if x.is_floating_point() else x)

    def split(self, size: int) -> Iterator[Self]:
        """Yield views of `size` samples each; the last may have fewer."""
        if len(self) <= size:
            yield self
            return
        rows = size * self.rows_per_sample
        for first in range(0, len(self) * self.rows_per_sample, rows):
            yield self._slice(first, first + rows)

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return the part of each sequence that a rank of the context axis computes.

        Args:
            take: maps whole rows [B, S, ...] to this rank's positions of them.
        """
        raise NotImplementedError(f"{type(self).__name__} is not split along sequences")

    def without_padding(self) -> Self:
        """Return the batch without what only a model with experts reads."""
        return self

    def count_documents(self) -> Self:
        """Return the batch, which lies on the host, with the most documents of a row."""
        return self

    def _slice(self, first: int, stop: int) -> Self:
        """Return some of the rows."""

        def take(name: str, column: Tensor) -> Tensor:
            lengths, dim = self.lengths_of(name), int(len(column) == 1)
            # If all lengths are 1, positions and rows are the same.
            if lengths is None or column.shape[dim] != lengths.total:
                return column[first:stop]
            return column.narrow(dim, lengths.starts[first], lengths.select(first, stop).total)

        return self._each(take)._each_length(lambda lengths: lengths.select(first, stop))

    def _each_length(self, change: Callable[[SampleLengths], SampleLengths]) -> Self:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        changes: dict[str, Any] = {
            name: change(x) for name, x in columns.items() if isinstance(x, SampleLengths)
        }
        return replace(self, **changes) if changes else self

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        return replace(self, **{name: change(name, x) for name, x in self.columns().items()})


@dataclass(frozen=True)
class TokenBatch(Batch):
    """Rows of tokens of a language model.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64; the token that follows, or -100 where none counts in the loss.
        positions: [B, S] int64, from the start of each document; None: from the row's start.
        document_ids: [B, S] int32, within the row; attention stays inside a document.
            None: a row is one document.
        sources: [B] int64, from which source each row is; None: all are from one.
        padding_mask: [B, S] bool; True at filler, which belongs to no document. A token without a
            label, such as a prompt's, is no filler. None: there is none.
        dropout_keys: [B, S] int64, from which dropout draws; None: there is none.
        row_lengths: tokens of each row, where rows have no padding: tokens, labels, positions and
            keys are then [1, T], the rows one after the other. None: rows have one length.
        max_documents: a number that the documents of no row exceed; see `LanguageModel.forward`.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    sources: Tensor | None = None
    padding_mask: Tensor | None = None
    dropout_keys: Tensor | None = None
    row_lengths: SampleLengths | None = None
    max_documents: int | None = None

    @property
    def padding(self) -> Tensor | None:
        """Whether each position is filler."""
        return self.padding_mask

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return a rank's positions; document ids and padding stay whole.

        Masks need the document ids of all keys, and token weights the padding of whole rows.
        """
        # Numbered before the split: the parts of a rank need not be neighbours.
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        tokens, labels, positions = map(take, (self.tokens, self.labels, positions))
        keys = None if self.dropout_keys is None else take(self.dropout_keys)
        return replace(self, tokens=tokens, labels=labels, positions=positions, dropout_keys=keys)

    def without_padding(self) -> Self:
        """Return the batch without the padding mask, which only routers read."""
        return replace(self, padding_mask=None)

    def count_documents(self) -> Self:
        """Return the batch with the most documents of a row, rounded up to a power of two.

        The host counts, because a model on a GPU would wait for the number. A power of two, so
        that few sizes are compiled.
        """
        ids = self.document_ids
        if ids is None:
            return self
        most = int((ids[:, 1:] != ids[:, :-1]).sum(1).max()) + 1
        return replace(self, max_documents=1 << (most - 1).bit_length())


@dataclass(frozen=True)
class SampleBatch(Batch):
    """Samples of any data set, by field.

    Attributes:
        fields: name -> a tensor with one row a sample, [B, ...].
        is_valid: [B] bool; False for a sample that only fills up the last batch of a validation.
            None: all samples are valid.
        sources: [B] int64, from which source each sample is; None: all are from one.
    """

    fields: Mapping[str, Tensor]
    is_valid: Tensor | None = None
    sources: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Return all fields by name."""
        extra = {"is_valid": self.is_valid, "sources": self.sources}
        return {**self.fields, **{k: v for k, v in extra.items() if v is not None}}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> Self:
        """Return the batch of some fields; the inverse of `columns`."""
        fields = dict(columns)
        is_valid, sources = fields.pop("is_valid", None), fields.pop("sources", None)
        return cls(fields, is_valid, sources)

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        columns = {name: change(name, value) for name, value in self.columns().items()}
        is_valid, sources = columns.pop("is_valid", None), columns.pop("sources", None)
        return replace(self, fields=columns, is_valid=is_valid, sources=sources)


@dataclass(frozen=True)
class RaggedSamples(SampleBatch):
    """Samples some of whose fields have a number of positions of their own, without padding.

    Such fields are flat, [T, ...]: the positions of all samples, one after the other.

    Attributes:
        row_lengths: the positions of each sample.
    """

    row_lengths: SampleLengths | None = None

    @classmethod
    def from_columns(cls, columns: Mapping[str, Tensor]) -> Self:
        """Return the batch of some fields that lie on the host; `lengths` [B] is no field."""
        batch = super().from_columns({k: x for k, x in columns.items() if k != "lengths"})
        return replace(batch, row_lengths=SampleLengths(columns["lengths"].tolist()))
