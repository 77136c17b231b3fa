"""Sources become samples that are addressed by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .batch import Batch
from .configs import SourceConfig
from .order import Indices, TrainingOrder, ValidationOrder
from .packing import PACKINGS, Packed, Rows
from .prepare import default_cache
from .store import TokenStore
from .tables import Data
from .tokenizer import Tokenizer

LOCATE_AHEAD = 4096


class Samples:
    """A run's samples, numbered from 0.

    Args:
        sources: the packed sources.
        order: which source and row a sample is.
        vocab_size: tokens must be below it.
    """

    def __init__(
        self, sources: Sequence[Packed], order: TrainingOrder | ValidationOrder, vocab_size: int
    ) -> None:
        self.sources = sources
        self.order = order
        self.vocab_size = vocab_size
        self.rows_per_epoch = sum(source.num_rows for source in sources)
        self._located_from = 0
        self._located = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def batch(self, first: int, count: int) -> Batch:
        """Return samples `first` to `first + count - 1`."""
        return self.gather(np.arange(first, first + count)).to_batch()

    def gather(self, samples: Indices) -> Rows:
        """Return the samples of these numbers, [B], ascending.

        Raises:
            DataError: a token is outside the vocabulary: the stored tokens are damaged.
        """
        source, row = self._locate(samples)
        alone = len(self.sources) == 1
        rows = self.sources[0].gather(row) if alone else self._merge(source, row)
        self._check_vocabulary(rows, source)
        return rows

    def _locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return source and row of each sample; some thousands are worked out at a time."""
        first, last = int(samples[0]), int(samples[-1])
        known = self._located_from
        if not (known <= first and last < known + len(self._located[0])):
            ahead = np.arange(first, last + 1 + LOCATE_AHEAD)
            self._located = self.order.locate(ahead)
            self._located_from = known = first
        return self._located[0][samples - known], self._located[1][samples - known]

    def _check_vocabulary(self, rows: Rows, source: Indices) -> None:
        largest = max(rows.tokens.max(), rows.labels.max())
        if largest >= self.vocab_size:
            outside = np.maximum(rows.tokens, rows.labels).max(axis=1) >= self.vocab_size
            store = self.sources[source[outside][0]].store
            raise DataError(
                f"{store.place}: holds token {largest}; "
                f"the tokenizer's vocabulary has {self.vocab_size}",
                "the files are damaged: delete them and prepare them again",
            )

    def _merge(self, source: Indices, row: Indices) -> Rows:
        """Gather each source's rows in one call and put them where they belong."""
        order = np.argsort(source, kind="stable")
        which, starts = np.unique(source[order], return_index=True)
        groups = np.split(row[order], starts[1:])
        parts = [
            self.sources[index].gather(group) for index, group in zip(which, groups, strict=True)
        ]
        place = np.argsort(order)
        return Rows._make(
            None if columns[0] is None else np.concatenate(columns)[place]
            for columns in zip(*parts, strict=True)
        )


@dataclass(frozen=True)
class OpenedData:
    """The `[data]` table, opened.

    Attributes:
        train: endless samples.
        validation: each row once; None where nothing is held out.
        fingerprint: per source, what a resumed run must find unchanged; JSON.
        notes: what the user should know.
    """

    train: Samples
    validation: Samples | None
    fingerprint: dict[str, Any]
    notes: list[str]


def open_data(table: Data, tokenizer: Tokenizer, seed: int) -> OpenedData:
    """Open, or tokenise once, every source, and split and pack them.

    Raises:
        DataError: a source cannot be read, or is too short for one row.
        EnvironmentFault: the cache cannot be written.
    """
    cache = Path(table.cache_dir).expanduser() if table.cache_dir else default_cache()
    stores = [source.open(tokenizer, cache) for source in table.sources]
    names = [f"{index}.{source.name}" for index, source in enumerate(table.sources)]
    held_out = any(source.split == "validation" for source in table.sources)
    fraction = 0.0 if held_out else table.validation_fraction
    pack = PACKINGS[table.packing]
    train: list[tuple[Packed, float]] = []
    validation: list[tuple[Packed, float]] = []
    for source, store in zip(table.sources, stores, strict=True):
        end = store.num_tokens
        border = end
        if source.split == "validation":
            border = 0
        elif fraction:
            border = split_point(store, fraction, table.seq_len)
        for part, start, stop in ((train, 0, border), (validation, border, end)):
            if start < stop:
                packed = pack(store, start, stop, table.seq_len)
                if not packed.num_rows and not (part is validation and fraction):
                    needed = table.seq_len + 1 if table.packing == "concat" else 2
                    raise _too_short(source, stop - start, needed)
                if packed.num_rows:
                    part.append((packed, source.weight))
    if not train:
        raise DataError('no source has split = "train"', "data.sources needs one")
    return OpenedData(
        train=_training(train, seed, table.shuffle, tokenizer.vocab_size),
        validation=_validation(validation, tokenizer.vocab_size) if validation else None,
        fingerprint={
            name: {"tokens": store.num_tokens, "xxh3": store.fingerprint}
            for name, store in zip(names, stores, strict=True)
        },
        notes=[_note(name, store) for name, store in zip(names, stores, strict=True)],
    )


def split_point(store: TokenStore, fraction: float, seq_len: int) -> int:
    """Return where the held-out tail of a source begins; its end if there is no room for a row.

    The nearest document border is taken if it changes the tail by less than half.
    """
    row = seq_len + 1
    tail = max(round(store.num_tokens * fraction), row)
    if tail + row > store.num_tokens:
        return store.num_tokens
    target = store.num_tokens - tail
    after = int(np.searchsorted(store.offsets, target))
    borders = [int(border) for border in store.offsets[max(after - 1, 0) : after + 1]]
    nearest = min(borders, key=lambda border: abs(border - target))
    in_reach = row <= nearest <= store.num_tokens - row and abs(nearest - target) <= tail // 2
    return nearest if in_reach else target


def _training(
    parts: Sequence[tuple[Packed, float]], seed: int, shuffle: bool, vocab_size: int
) -> Samples:
    packed, weights = zip(*parts, strict=True)
    rows = [source.num_rows for source in packed]
    return Samples(packed, TrainingOrder(rows, weights, seed, shuffle=shuffle), vocab_size)


def _validation(parts: Sequence[tuple[Packed, float]], vocab_size: int) -> Samples:
    packed, weights = zip(*parts, strict=True)
    rows = [source.num_rows for source in packed]
    return Samples(packed, ValidationOrder(rows, weights), vocab_size)


def _too_short(source: SourceConfig, tokens: int, needed: int) -> DataError:
    return DataError(
        f'the "{source.name}" source has {tokens} tokens for {source.split}; a row needs {needed}',
        "give it more text, or lower data.seq_len",
    )


def _note(name: str, store: TokenStore) -> str:
    note = f"{name}: {store.num_tokens:,} tokens in {store.num_documents:,} documents"
    if store.skipped:
        note += f", {store.skipped:,} skipped, such as {store.faults[0]}"
    return note
