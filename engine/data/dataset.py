"""Opens the sources of a recipe, splits and packs them, and numbers their samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import DataError
from ..corpus.cache import cache_folder
from ..corpus.checksums import ALONE, Share, require_intact
from ..corpus.prepare import open_source
from ..corpus.store import TokenStore
from ..sources.configs import DocumentSource, SourceConfig
from ..tokenizers.tokenizer import Tokenizer
from .order import TrainingOrder, ValidationOrder, source_key
from .packing import PACKINGS, Packed
from .samples import NumberedSamples, Samples, TrainingSamples
from .stream import Stream, stream_producer
from .tables import Data


@dataclass(frozen=True)
class OpenedData:
    """The samples of the `[data]` table.

    Attributes:
        train: the training samples, without end.
        validation: each held-out row once; None if nothing is held out.
        fingerprint: for each source, what a resumed run must find unchanged; JSON.
        notes: sentences for the user.
    """

    train: NumberedSamples
    validation: NumberedSamples | None
    fingerprint: dict[str, Any]
    notes: list[str]


class _PackedSource(NamedTuple):
    """The rows of a source, its weight, and its label in metrics."""

    packed: Packed
    weight: float
    label: str


@dataclass
class _Opening:
    """The sources that have been opened so far."""

    train: list[_PackedSource] = field(default_factory=list)
    validation: list[_PackedSource] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def open_data(
    table: Data, tokenizer: Tokenizer, seed: int, run: str = "", share: Share = ALONE
) -> OpenedData:
    """Open, or tokenise once, every source, and split and pack them.

    Args:
        table: the `[data]` table.
        tokenizer: the recipe's tokenizer.
        seed: the seed of the order of samples.
        run: the run's directory; streams are tokenised for it alone. Empty: nothing is trained.
        share: the processes that divide the comparison of files with their checksums.

    Raises:
        DataError: a source cannot be read, is damaged, or is too short for one row.
        EnvironmentFault: the cache cannot be written.
    """
    cache = cache_folder(table.cache_dir)
    held_out = any(source.split == "validation" for source in table.sources)
    # A source that is meant for validation replaces the tails of the others.
    fraction = 0.0 if held_out else table.validation_fraction
    opening = _Opening()
    for index, (source, label) in enumerate(zip(table.sources, table.labels, strict=True)):
        name = f"{index}.{source.name}"
        if isinstance(source, DocumentSource) and source.is_streamed:
            producer = stream_producer(source, tokenizer, table, cache, run, name)
            # As in `TrainingOrder`, only sources of training are counted for the key, so that
            # another validation source does not change the shuffle.
            stream = Stream(name, producer, table, source_key(seed, len(opening.train)))
            opening.train.append(_PackedSource(stream, source.weight, label))
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
    packed, weights, labels = zip(*opening.train, strict=True)
    rows = [source.num_rows for source in packed]
    order = TrainingOrder(rows, weights, seed, shuffle=table.shuffle)
    train = TrainingSamples(packed, order, tokenizer.vocab_size, labels)
    if train.streams and fraction and not opening.validation:
        opening.notes.append(
            'no validation: streams hold nothing out; another source may have split = "validation"'
        )
    for stream in train.streams.values() if run else ():
        stream.start_producer()  # now: a later fork would copy a process with a model
    validation = None
    if opening.validation:
        packed, weights, labels = zip(*opening.validation, strict=True)
        each_once = ValidationOrder([source.num_rows for source in packed], weights)
        validation = Samples(packed, each_once, tokenizer.vocab_size, labels)
    return OpenedData(train, validation, opening.fingerprint, opening.notes)


def _split(
    opening: _Opening,
    table: Data,
    source: SourceConfig,
    label: str,
    store: TokenStore,
    fraction: float,
) -> None:
    """Add a source's rows to the training samples, and its held-out rows to the validation."""
    border = end = store.num_tokens
    if source.split == "validation":
        border = 0
    elif fraction:
        border = split_point(store, fraction, table.seq_len)
    for part, start, stop in ((opening.train, 0, border), (opening.validation, border, end)):
        if start < stop:
            packed = PACKINGS[table.packing](store, start, stop, table.seq_len)
            # A held-out tail may be too short for a row, but not the source that a recipe names.
            if not packed.num_rows and not (part is opening.validation and fraction):
                needed = table.seq_len + 1 if table.packing == "concat" else 2
                raise DataError(
                    f'the "{source.name}" source has {stop - start} tokens for {source.split}; '
                    f"a row needs {needed}",
                    "give it more text, or lower data.seq_len",
                )
            if packed.num_rows:
                part.append(_PackedSource(packed, source.weight, label))


def split_point(store: TokenStore, fraction: float, seq_len: int) -> int:
    """Return the token at which the held-out tail begins; the last if a row does not fit in it.

    The nearest document border is taken if it changes the length of the tail by less than half.
    """
    row = seq_len + 1
    tail = max(round(store.num_tokens * fraction), row)
    if tail + row > store.num_tokens:
        return store.num_tokens
    target = store.num_tokens - tail
    after = int(np.searchsorted(store.offsets, target))
    # The two borders around the target: a document is then not in training and validation both.
    borders = [int(border) for border in store.offsets[max(after - 1, 0) : after + 1]]
    nearest = min(borders, key=lambda border: abs(border - target))
    is_close = row <= nearest <= store.num_tokens - row and abs(nearest - target) <= tail // 2
    return nearest if is_close else target


def _note(label: str, store: TokenStore) -> str:
    note = f"{label}: {store.num_tokens:,} tokens in {store.num_documents:,} documents"
    if store.skipped:
        note += f", {store.skipped:,} skipped, such as {store.faults[0]}"
    return note
