"""Rows against slow and obvious ones."""

import bisect
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.stores import EOS, random_lengths, store_of
from trainer.engine.corpus.store import TokenStore
from trainer.engine.data.batch import IGNORED
from trainer.engine.data.packing import (
    PACKINGS,
    ConcatRows,
    DocumentRows,
    PaddedRows,
    best_fit_decreasing,
    slice_documents,
)

LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=60)


def documents(store: TokenStore) -> list[list[int]]:
    borders = pairwise(store.offsets)
    return [store.tokens[start:stop].tolist() for start, stop in borders]


def predictions(store: TokenStore) -> list[tuple[int, int]]:
    """Every token of every document with the one that follows it."""
    return sorted(pair for document in documents(store) for pair in pairwise(document))


def best_fit_rows(lengths: list[int], capacity: int) -> int:
    """Rows that best-fit decreasing needs, one piece at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else capacity
        bisect.insort(rooms, room - length)
    return len(rooms)


def next_fit_rows(lengths: list[int], capacity: int) -> int:
    rows, room = 0, 0
    for length in lengths:
        if length > room:
            rows, room = rows + 1, capacity
        room -= length
    return rows


@given(LENGTHS, st.integers(1, 40), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=60)
def test_concat_rows_are_the_stream_cut_up(
    lengths: list[int], seq_len: int, before: int, after: int
) -> None:
    store = store_of(lengths)
    start, stop = min(before, store.num_tokens), max(store.num_tokens - after, before)
    stream = store.tokens[start:stop].tolist()
    packed = ConcatRows(store, start, min(stop, store.num_tokens), seq_len)
    rows = packed.gather(np.arange(packed.num_rows))
    assert packed.num_rows == max(len(stream) - 1, 0) // seq_len
    assert rows.tokens.ravel().tolist() == stream[: packed.num_rows * seq_len]
    assert rows.labels.ravel().tolist() == stream[1 : packed.num_rows * seq_len + 1]
    assert rows.positions is None
    assert rows.document_ids is None


@given(LENGTHS, st.integers(1, 40))
@settings(max_examples=60)
def test_packed_documents_hold_every_prediction_once(lengths: list[int], seq_len: int) -> None:
    store = store_of(lengths)
    packed = DocumentRows(store, 0, store.num_tokens, seq_len)
    rows = packed.gather(np.arange(packed.num_rows))
    learned = rows.labels != IGNORED
    pairs = zip(rows.tokens[learned].tolist(), rows.labels[learned].tolist(), strict=True)
    assert sorted(pairs) == predictions(store)
    assert (rows.tokens[~learned] == EOS).all()


@given(LENGTHS, st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=60)
def test_packed_rows_read_as_whole_pieces(lengths: list[int], seq_len: int, seed: int) -> None:
    store = store_of(lengths)
    packed = DocumentRows(store, 0, store.num_tokens, seq_len)
    pieces = {}
    for document in documents(store):
        for first in range(0, len(document) - 1, seq_len):
            inputs = document[first : min(first + seq_len, len(document) - 1)]
            pieces[inputs[0]] = (inputs, document[first + 1 : first + len(inputs) + 1])
    if not packed.num_rows:
        assert not pieces
        return
    rows = packed.gather(np.random.default_rng(seed).integers(0, packed.num_rows, 5))
    assert rows.positions is not None
    assert rows.document_ids is not None
    assert rows.padding_mask is not None
    columns = rows.tokens, rows.labels, rows.positions, rows.document_ids, rows.padding_mask
    for tokens, labels, positions, ids, is_padding in zip(*columns, strict=True):
        at, number = 0, 0
        while at < seq_len:
            run = int((ids == number).sum())
            piece = slice(at, at + run)
            assert (ids[piece] == number).all()
            assert (is_padding[piece] == (labels[at] == IGNORED)).all()
            assert positions[piece].tolist() == list(range(run))
            if labels[at] == IGNORED:
                assert piece.stop == seq_len
                assert (labels[piece] == IGNORED).all()
            else:
                assert (tokens[piece].tolist(), labels[piece].tolist()) == pieces[tokens[at]]
            at, number = at + run, number + 1


@given(LENGTHS, st.integers(1, 40))
@settings(max_examples=60)
def test_padded_rows_hold_one_piece_each(lengths: list[int], seq_len: int) -> None:
    store = store_of(lengths)
    packed = PaddedRows(store, 0, store.num_tokens, seq_len)
    rows = packed.gather(np.arange(packed.num_rows))
    learned = rows.labels != IGNORED
    pairs = zip(rows.tokens[learned].tolist(), rows.labels[learned].tolist(), strict=True)
    assert sorted(pairs) == predictions(store)
    assert rows.padding_mask is not None
    assert (rows.padding_mask == ~learned).all()
    lengths_of_rows = learned.sum(axis=1)
    assert (lengths_of_rows > 0).all()
    for tokens, labels, length in zip(rows.tokens, rows.labels, lengths_of_rows, strict=True):
        assert (tokens[length:] == EOS).all()
        assert (labels[length:] == IGNORED).all()
        assert labels[: length - 1].tolist() == tokens[1:length].tolist()
    assert rows.positions is None


@given(st.lists(st.integers(1, 50), min_size=0, max_size=300))
@settings(max_examples=100)
def test_placing_equal_lengths_together_is_best_fit_decreasing(lengths: list[int]) -> None:
    row, num_rows = best_fit_decreasing(np.array(lengths, dtype=np.int64), 50)
    assert num_rows == best_fit_rows(lengths, 50)
    filled = np.bincount(row, weights=lengths, minlength=num_rows)
    assert len(filled) == num_rows
    assert (filled <= 50).all()
    assert (filled > 0).all()
    assert row.tolist() == [] or list(dict.fromkeys(row.tolist())) == list(range(num_rows))


@pytest.mark.parametrize(("mean", "seq_len"), [(30, 256), (200, 256), (600, 1024), (5000, 2048)])
def test_rows_are_fuller_than_next_fit_makes_them(mean: int, seq_len: int) -> None:
    store = store_of(random_lengths(3000, mean))
    pieces = slice_documents(store, 0, store.num_tokens, seq_len)
    packed = DocumentRows(store, 0, store.num_tokens, seq_len)
    fill = pieces.lengths.sum() / (packed.num_rows * seq_len)
    assert packed.num_rows < next_fit_rows(pieces.lengths.tolist(), seq_len)
    assert fill > 0.95


def test_a_part_of_the_stream_holds_the_predictions_inside_it() -> None:
    store = store_of([10, 10, 10])
    start, stop = 5, 27  # inside the first and the last document
    pieces = slice_documents(store, start, stop, 8)
    inside = []
    for first, length in zip(*pieces, strict=True):
        inside += [(index, index + 1) for index in range(first, first + length)]
    ends = {int(end) - 1 for end in store.offsets[1:]}
    assert inside == [(i, i + 1) for i in range(start, stop - 1) if i not in ends]


def test_many_pieces_are_packed_in_little_time() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 300, 300_000).clip(1, 4096)
    row, num_rows = best_fit_decreasing(lengths, 4096)
    assert len(row) == len(lengths)
    assert lengths.sum() / (num_rows * 4096) > 0.999


def marked_store(lengths: list[int], seed: int) -> TokenStore:
    store = store_of([length + 1 for length in lengths])
    learned = np.random.default_rng(seed).random(store.num_tokens) < 0.6
    return replace(store, loss_mask=learned)


@pytest.mark.parametrize("packing", PACKINGS)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=40)
def test_labels_that_are_not_learned_are_masked_and_nothing_else_changes(
    packing: str, lengths: list[int], seq_len: int, seed: int
) -> None:
    marked = marked_store(lengths, seed)
    packed = PACKINGS[packing](marked, 0, marked.num_tokens, seq_len)
    plain = PACKINGS[packing](replace(marked, loss_mask=None), 0, marked.num_tokens, seq_len)
    numbers = np.arange(packed.num_rows)[::-1]
    rows, expected = packed.gather(numbers), plain.gather(numbers)
    assert rows.tokens.tolist() == expected.tokens.tolist()
    # Every token but eos is another number, and what an eos ends stands before it.
    assert marked.loss_mask is not None
    stream = marked.tokens.tolist()
    is_learned = {
        (before, token): bool(flag)
        for before, token, flag in zip([None, *stream], stream, marked.loss_mask, strict=False)
    }
    # Rows without padding are flat: one row for this.
    columns = map(np.atleast_2d, (rows.tokens, rows.labels, expected.labels))
    for inputs, labels, truth in zip(*columns, strict=True):
        naive = [
            label if label != IGNORED and is_learned[token, label] else IGNORED
            for token, label in zip(inputs.tolist(), truth.tolist(), strict=True)
        ]
        assert labels.tolist() == naive
