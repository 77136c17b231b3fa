"""Packing: how a stream of documents becomes rows of `seq_len` tokens.

Every packing counts predictions: a row holds the inputs, its labels are the tokens that follow.
Rows are gathered from the memory-mapped tokens by number, many in one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.ragged.lengths import SampleLengths
from ..corpus.store import TokenStore
from .batch import IGNORED, TokenBatch
from .joined.best_fit import best_fit_decreasing
from .order import Indices


class PackedRows(NamedTuple):
    """A batch as arrays; see `TokenBatch`.

    Where rows have `lengths`, they stand one after the other in flat arrays [T], and only `lengths`
    and `sources` have one number a row.
    """

    tokens: Indices
    labels: Indices
    positions: Indices | None = None
    document_ids: NDArray[np.int32] | None = None
    sources: Indices | None = None
    padding_mask: NDArray[np.bool_] | None = None
    dropout_keys: Indices | None = None
    lengths: Indices | None = None

    def to_batch(self) -> TokenBatch:
        """Return tensors that share the arrays' memory."""
        *arrays, lengths = self
        columns: Any = [None if column is None else torch.from_numpy(column) for column in arrays]
        if lengths is None:
            return TokenBatch(*columns)
        tokens, labels, positions, _, sources, _, keys = columns
        tokens, labels, positions = (x.unsqueeze(0) for x in (tokens, labels, positions))
        return TokenBatch(
            tokens,
            labels,
            positions,
            sources=sources,
            dropout_keys=None if keys is None else keys.unsqueeze(0),
            row_lengths=SampleLengths(lengths.tolist()),
        )

    def select(self, rows: Indices) -> PackedRows:
        """Return the rows at these places, [B]."""
        places, by_row = rows, ("sources", "lengths")
        if self.lengths is not None:
            starts = np.cumsum(self.lengths) - self.lengths
            places, _ = _concatenate_ranges(starts[rows], self.lengths[rows])
        columns: dict[str, Any] = {
            name: column[rows if name in by_row else places]
            for name, column in self._asdict().items()
            if column is not None
        }
        return PackedRows(**columns)

    def largest_tokens(self) -> Indices:
        """Return the largest token or label of each row, [B]."""
        largest: Indices = np.maximum(self.tokens, self.labels)
        if self.lengths is None:
            largest = largest.max(axis=1)
        else:
            largest = np.maximum.reduceat(largest, np.cumsum(self.lengths) - self.lengths)
        return largest

    def ignore(self, where: NDArray[np.bool_]) -> None:
        """Leave rows out of every count: their labels are -100, and all tokens are padding."""
        if self.lengths is not None:
            where = np.repeat(where, self.lengths)
        self.labels[where] = IGNORED
        if self.padding_mask is not None:
            self.padding_mask[where] = True

    @classmethod
    def concatenate(cls, parts: Iterable[PackedRows]) -> PackedRows:
        """Return the rows of several batches, one after the other."""
        first, *others = parts
        if not others:
            return first
        return cls._make(
            None if columns[0] is None else np.concatenate(columns)
            for columns in zip(first, *others, strict=True)
        )


class Packed(Protocol):
    """A source cut into rows."""

    num_rows: int

    @property
    def store(self) -> TokenStore:
        """The tokens of the source."""

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B]."""


class ConcatRows:
    """The token stream cut into rows; a row's last label is the next row's first token."""

    def __init__(self, store: TokenStore, start: int, stop: int, seq_len: int) -> None:
        self.store = store
        # One token less: the last input of the last row needs a token after it, as its label.
        self.num_rows = max(stop - start - 1, 0) // seq_len
        self.seq_len = seq_len
        self.windows = self._windows(store.tokens[start:stop])
        mask = store.loss_mask
        self.loss_mask = None if mask is None else self._windows(mask[start:stop])

    def _windows(self, column: NDArray[Any]) -> NDArray[Any]:
        """Return one overlapping window a row, so that a batch is one gather."""
        return np.lib.stride_tricks.as_strided(
            column,
            (self.num_rows, self.seq_len + 1),
            (self.seq_len * column.itemsize, column.itemsize),
            writeable=False,
        )

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B]."""
        counted = None if self.loss_mask is None else self.loss_mask[rows][:, 1:]
        columns = _inputs_and_labels(self.windows[rows], counted)
        return PackedRows(columns[0], columns[1])  # unpacking an array with * costs 4 % of a batch


def _inputs_and_labels(
    windows: NDArray[Any], counted: NDArray[np.bool_] | None
) -> NDArray[np.int64]:
    """Return the inputs and the labels of overlapping windows, [2, B, S].

    Args:
        windows: [B, S + 1]; the tokens.
        counted: [B, S]; which labels count in the loss; None: all.
    """
    # Tokens are stored in 16 or 32 bits, and torch takes int64 labels: the assignments widen and
    # copy in one pass.
    columns = np.empty((2, len(windows), windows.shape[1] - 1), dtype=np.int64)
    columns[0] = windows[:, :-1]
    columns[1] = windows[:, 1:]
    if counted is not None:
        np.copyto(columns[1], IGNORED, where=~counted)
    return columns


class DocumentSlices(NamedTuple):
    """Runs of inputs inside one document, at most `seq_len` long, in the order of the documents."""

    starts: Indices
    """[P]; where each begins in the store's tokens"""
    lengths: Indices
    """[P]; the label of the last input is the token after the slice"""


def slice_documents(store: TokenStore, start: int, stop: int, seq_len: int) -> DocumentSlices:
    """Cut the documents of tokens `[start, stop)` into slices of at most `seq_len` inputs.

    A document of L tokens, its end-of-document token included, has L - 1 predictions; each is in
    exactly one slice.
    """
    # `start` and `stop` may lie inside documents, at the border of the validation split: clip.
    first = int(np.searchsorted(store.offsets, start, side="right")) - 1
    last = int(np.searchsorted(store.offsets, stop, side="left"))
    borders = np.clip(store.offsets[first : last + 1], start, stop)
    inputs = np.maximum(np.diff(borders) - 1, 0)
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(inputs)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = number * seq_len
    return DocumentSlices(borders[document] + begin, np.minimum(inputs[document] - begin, seq_len))


class PaddedRows:
    """One slice of a document a row, padded at the right.

    Attention needs no mask: no token before the padding attends to it, and it has no labels.
    """

    def __init__(self, store: TokenStore, start: int, stop: int, seq_len: int) -> None:
        self.slices = slice_documents(store, start, stop, seq_len)
        self.num_rows = len(self.slices.starts)
        self.store = store
        self.positions = np.arange(seq_len + 1)

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B]."""
        # Beyond a slice, indices reach into the next document or past the store's end (hence clip):
        # padding overwrites what is read there.
        index = self.slices.starts[rows][:, None] + self.positions
        mask = self.store.loss_mask
        counted = None if mask is None else mask.take(index[:, 1:], mode="clip")
        windows = self.store.tokens.take(index, mode="clip")
        tokens, labels = _inputs_and_labels(windows, counted)
        padding = self.positions[:-1] >= self.slices.lengths[rows][:, None]
        np.copyto(tokens, self.store.eos_id, where=padding)
        np.copyto(labels, IGNORED, where=padding)
        return PackedRows(tokens, labels, padding_mask=padding)


class RaggedRows:
    """One slice of a document a row, without padding: flat arrays, and the length of each row."""

    def __init__(self, store: TokenStore, start: int, stop: int, seq_len: int) -> None:
        self.slices = slice_documents(store, start, stop, seq_len)
        self.num_rows = len(self.slices.starts)
        self.store = store

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B]."""
        lengths = self.slices.lengths[rows]
        index, positions = _concatenate_ranges(self.slices.starts[rows], lengths)
        # The token after a slice is its last label, so that no index is past the store's end.
        tokens, labels = (self.store.tokens[i].astype(np.int64) for i in (index, index + 1))
        if self.store.loss_mask is not None:
            np.copyto(labels, IGNORED, where=~self.store.loss_mask[index + 1])
        return PackedRows(tokens, labels, positions, lengths=lengths)


class DocumentRows:
    """Rows of whole slices, with little padding; attention and loss stay inside a slice."""

    def __init__(self, store: TokenStore, start: int, stop: int, seq_len: int) -> None:
        pieces = slice_documents(store, start, stop, seq_len)
        row, self.num_rows = best_fit_decreasing(pieces.lengths, seq_len)
        by_row = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=self.num_rows)
        filled = np.bincount(row, weights=pieces.lengths, minlength=self.num_rows)
        self.padding = seq_len - filled.astype(np.int64)
        # What is left of a row is one more piece, so that any rows' pieces fill a batch end to end.
        short = np.flatnonzero(self.padding)
        ends = np.cumsum(counts)[short]
        self.starts = np.insert(pieces.starts[by_row], ends, 0)
        self.lengths = np.insert(pieces.lengths[by_row], ends, self.padding[short])
        self.counts = counts + (self.padding > 0)
        self.first = np.cumsum(self.counts) - self.counts
        self.store = store
        self.seq_len = seq_len

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B]."""
        shape = (len(rows), self.seq_len)
        counts = self.counts[rows]
        piece, number = _concatenate_ranges(self.first[rows], counts)
        starts, lengths = self.starts[piece], self.lengths[piece]
        index, positions = _concatenate_ranges(starts, lengths)
        columns = np.empty((2, len(index)), dtype=np.int64)
        # A label is the next input, except at the end of a piece. Only padding, which is
        # overwritten, can lie beyond the store's end.
        columns[0] = self.store.tokens.take(index, mode="clip")
        columns[1, :-1] = columns[0, 1:]
        columns[1, np.cumsum(lengths) - 1] = self.store.tokens.take(starts + lengths, mode="clip")
        if self.store.loss_mask is not None:
            counted = self.store.loss_mask.take(index + 1, mode="clip")
            np.copyto(columns[1], IGNORED, where=~counted)
        padding = self.padding[rows]
        padded, _ = _concatenate_ranges(np.arange(1, shape[0] + 1) * shape[1] - padding, padding)
        columns[0, padded] = self.store.eos_id
        columns[1, padded] = IGNORED
        padding_mask = np.zeros(len(index), dtype=np.bool_)
        padding_mask[padded] = True
        return PackedRows(
            columns[0].reshape(shape),
            columns[1].reshape(shape),
            positions.reshape(shape),
            np.repeat(number.astype(np.int32), lengths).reshape(shape),
            padding_mask=padding_mask.reshape(shape),
        )


def _concatenate_ranges(starts: Indices, lengths: Indices) -> tuple[Indices, Indices]:
    """Return ranges of integers end to end, and each one's index in its range, [sum(lengths)]."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    flat = np.arange(lengths.sum())
    return flat + np.repeat(starts - begins, lengths), flat - np.repeat(begins, lengths)


PACKINGS: dict[str, Any] = {
    "concat": ConcatRows,
    "documents": DocumentRows,
    "none": PaddedRows,
    "ragged": RaggedRows,
}
