"""Sources become samples that are addressed by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import DataError
from ..corpus.checksums import ALONE, Share, require_intact
from ..corpus.prepare import cache_folder, open_source
from ..corpus.store import TokenStore
from ..sources.configs import DocumentSource, SourceConfig
from ..tokenizers.tokenizer import Tokenizer
from .order import TrainingOrder, ValidationOrder, source_key
from .packing import PACKINGS, Packed
from .samples import Samples, TrainingSamples
from .stream import Stream, stream_producer
from .tables import Data


@dataclass(frozen=True)
class OpenedData:
    """The `[data]` table, opened.

    Attributes:
        train: endless samples.
        validation: each row once; None where nothing is held out.
        fingerprint: per source, what a resumed run must find unchanged; JSON.
        notes: what the user should know.
    """

    train: TrainingSamples
    validation: Samples | None
    fingerprint: dict[str, Any]
    notes: list[str]


class _Part(NamedTuple):
    """The rows of a source, its share, and what metrics call it."""

    packed: Packed
    weight: float
    label: str


@dataclass
class _Opening:
    """What has been opened so far."""

    train: list[_Part] = field(default_factory=list)
    validation: list[_Part] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def open_data(
    table: Data, tokenizer: Tokenizer, seed: int, run: str = "", share: Share = ALONE
) -> OpenedData:
    """Open, or tokenise once, every source, and split and pack them.

    Args:
        table: the `[data]` table.
        tokenizer: the recipe's.
        seed: of the order of samples.
        run: the run's directory, of which each has its own streams; empty: nothing is trained.
        share: the processes that divide the comparison of files with their checksums.

    Raises:
        DataError: a source cannot be read, is damaged, or is too short for one row.
        EnvironmentFault: the cache cannot be written.
    """
    cache = cache_folder(table.cache_dir)
    held_out = any(source.split == "validation" for source in table.sources)
    fraction = 0.0 if held_out else table.validation_fraction
    opening = _Opening()
    for index, (source, label) in enumerate(zip(table.sources, table.labels, strict=True)):
        name = f"{index}.{source.name}"
        if isinstance(source, DocumentSource) and source.is_streamed:
            producer = stream_producer(source, tokenizer, table, cache, run, name)
            stream = Stream(name, producer, table, source_key(seed, len(opening.train)))
            opening.train.append(_Part(stream, source.weight, label))
            opening.fingerprint[name] = {"stream": stream.fingerprint}
            opening.notes.append(f"{label}: a stream, tokenised while training")
        else:
            store = open_source(source, tokenizer, cache)
            if store.folder and getattr(source, "verify", "first") == "first":
                require_intact(store.folder, cache, share)
            _split(opening, table, source, label, store, fraction)
            opening.fingerprint[name] = {"tokens": store.num_tokens, "xxh3": store.fingerprint}
            opening.notes.append(_note(label, store))
    if not opening.train:
        raise DataError('no source has split = "train"', "data.sources needs one")
    packed, rows, weights, labels = _columns(opening.train)
    order = TrainingOrder(rows, weights, seed, shuffle=table.shuffle)
    train = TrainingSamples(packed, order, tokenizer.vocab_size, labels)
    if train.streams and fraction and not opening.validation:
        opening.notes.append(
            'no validation: streams hold nothing out; another source may have split = "validation"'
        )
    for stream in train.streams.values() if run else ():
        stream.start_producer()  # now: later the process would be a copy of one with a model
    validation = None
    if opening.validation:
        packed, rows, weights, labels = _columns(opening.validation)
        order_of_rows = ValidationOrder(rows, weights)
        validation = Samples(packed, order_of_rows, tokenizer.vocab_size, labels)
    return OpenedData(train, validation, opening.fingerprint, opening.notes)


def _split(
    opening: _Opening,
    table: Data,
    source: SourceConfig,
    label: str,
    store: TokenStore,
    fraction: float,
) -> None:
    """Add a source's rows to the training, and those that it holds out to the validation."""
    end = store.num_tokens
    border = end
    if source.split == "validation":
        border = 0
    elif fraction:
        border = split_point(store, fraction, table.seq_len)
    parts = ((opening.train, 0, border), (opening.validation, border, end))
    for part, start, stop in parts:
        if start < stop:
            packed = PACKINGS[table.packing](store, start, stop, table.seq_len)
            if not packed.num_rows and not (part is opening.validation and fraction):
                needed = table.seq_len + 1 if table.packing == "concat" else 2
                raise _too_short(source, stop - start, needed)
            if packed.num_rows:
                part.append(_Part(packed, source.weight, label))


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


def _columns(
    parts: Sequence[_Part],
) -> tuple[list[Packed], list[int], list[float], list[str]]:
    """Return the sources, how many rows each has, their weights and their labels."""
    packed = [part.packed for part in parts]
    rows = [source.num_rows for source in packed]
    return packed, rows, [part.weight for part in parts], [part.label for part in parts]


def _too_short(source: SourceConfig, tokens: int, needed: int) -> DataError:
    return DataError(
        f'the "{source.name}" source has {tokens} tokens for {source.split}; a row needs {needed}',
        "give it more text, or lower data.seq_len",
    )


def _note(label: str, store: TokenStore) -> str:
    note = f"{label}: {store.num_tokens:,} tokens in {store.num_documents:,} documents"
    if store.skipped:
        note += f", {store.skipped:,} skipped, such as {store.faults[0]}"
    return note
