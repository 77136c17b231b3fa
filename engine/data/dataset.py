"""Opens the sources of a recipe, splits and packs them, and numbers their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..core.errors import DataError
from ..corpus.cache import cache_folder
from ..corpus.checksums import ALONE, Share, require_intact
from ..corpus.prepare import open_stores
from ..corpus.store import Divide, TokenStore
from ..sources.configs import DocumentSource, SourceConfig
from ..tokenizers.tokenizer import Tokenizer
from .holdout import find_borders
from .joined.joined_rows import join_rows
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


class Turn(NamedTuple):
    """A training split, and the steps that it has in each round over all splits.

    Attributes:
        name: what metrics call it; empty: there is one alone.
        steps: optimizer steps.
        table: the `[data]` table of the split, as if it were trained on alone.
        opened: the samples; their sources are numbered among those of all splits.
    """

    name: str
    steps: int
    table: Data
    opened: OpenedData


@dataclass(frozen=True)
class Turns:
    """What a run trains on: splits one after the other, and after the last one the first again.

    The split of a global batch follows from the number of the batch alone.

    Attributes:
        turns: the splits in order.
        epoch_samples: samples of an epoch: of a round over all splits, or a pass over the only one.
    """

    turns: Sequence[Turn]
    epoch_samples: int

    @cached_property
    def round_steps(self) -> int:
        """Optimizer steps of a round over all splits."""
        return sum(turn.steps for turn in self.turns)

    @cached_property
    def round_samples(self) -> int:
        """Samples of a round over all splits."""
        return sum(turn.steps * turn.table.global_batch for turn in self.turns)

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps of an epoch, not always a whole number."""
        return self.epoch_samples * self.round_steps / self.round_samples

    def count_steps(self, batch: int) -> list[int]:
        """Return how many of the global batches before this one each split has."""
        rounds, left = divmod(batch, self.round_steps)
        counts = []
        for turn in self.turns:
            counts.append(rounds * turn.steps + min(left, turn.steps))
            left = max(0, left - turn.steps)
        return counts

    def locate(self, batch: int) -> tuple[int, int]:
        """Return the split of a global batch, and the number of the batch in it; both from 0."""
        before, after = self.count_steps(batch), self.count_steps(batch + 1)
        split = next(index for index, count in enumerate(after) if count > before[index])
        return split, before[split]

    def count_samples(self, batch: int) -> int:
        """Return how many samples the global batches before this one have."""
        counts = zip(self.count_steps(batch), self.turns, strict=True)
        return sum(steps * turn.table.global_batch for steps, turn in counts)

    def find_batch(self, samples: int) -> int:
        """Return how many whole global batches the first samples of a run are."""
        rounds, left = divmod(samples, self.round_samples)
        batch = rounds * self.round_steps
        for turn in self.turns:
            steps = min(left // turn.table.global_batch, turn.steps)
            # What does not fill a batch of one split is no batch of the next one either.
            left = left - steps * turn.table.global_batch if steps == turn.steps else 0
            batch += steps
        return batch

    @property
    def separate_labels(self) -> Sequence[str]:
        """The labels of the sources whose losses are logged apart."""
        return self.turns[0].opened.train.separate_labels

    @property
    def validation(self) -> list[tuple[str, NumberedSamples, Data]]:
        """Name, held-out samples and table of each split that holds some out."""
        splits = [(turn.name, turn.opened.validation, turn.table) for turn in self.turns]
        return [(name, samples, table) for name, samples, table in splits if samples is not None]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must find unchanged, by split if there are splits."""
        fingerprints = {turn.name: turn.opened.fingerprint for turn in self.turns}
        return fingerprints.get("", fingerprints)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        return [note for turn in self.turns for note in turn.opened.notes]


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
    table: Data,
    tokenizer: Tokenizer,
    seed: int,
    run: str = "",
    share: Share = ALONE,
    longest: int = 0,
    divide: Divide | None = None,
) -> OpenedData:
    """Open, or tokenise once, every source, and split and pack them.

    Args:
        table: the `[data]` table.
        tokenizer: the recipe's tokenizer.
        seed: the seed of the order of samples.
        run: the run's directory; streams are tokenised for it alone. Empty: nothing is trained.
        share: the processes that divide the comparison of files with their checksums.
        longest: tokens of the longest row of all training splits, so that they hold out the same
            of a source that they share; 0: there are no others.
        divide: selects documents that are trained on; None: all are.

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
            stores = open_stores(source, tokenizer, cache)
            for store in stores:
                if store.folder and getattr(source, "verify", "first") == "first":
                    require_intact(store.folder, cache, share)
            found = find_borders(source, stores, fraction, max(table.seq_len, longest))
            borders: list[int] | None = found
            if divide and source.split == "train":
                chosen = [divide(*pair, label) for pair in zip(stores, found, strict=True)]
                stores, borders = [store for store in chosen if store is not None], None
            _split(opening, table, source, label, stores, borders)
            opening.fingerprint[name] = {
                "tokens": sum(store.num_tokens for store in stores),
                "xxh3": " ".join(store.fingerprint for store in stores),
            }
            opening.notes += [_note(label, store) for store in stores]
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
    stores: Sequence[TokenStore],
    borders: Sequence[int] | None,
) -> None:
    """Add rows before a token of each store to the training samples, others to the validation.

    Without borders all are trained on, and there may be none.
    """
    may_be_empty, is_training = borders is None, source.split == "train"
    borders = [store.num_tokens for store in stores] if borders is None else borders
    for part in (opening.train, opening.validation):
        packed, tokens = list[Packed](), 0
        for store, border in zip(stores, borders, strict=True):
            start, stop = (0, border) if part is opening.train else (border, store.num_tokens)
            if start < stop:
                tokens += stop - start
                packed.append(PACKINGS[table.packing](store, start, stop, table.seq_len))
        packed = [each for each in packed if each.num_rows]
        if packed:
            part.append(_PackedSource(join_rows(packed), source.weight, label))
        # A held-out tail may be too short for a row, but not the source that a recipe names.
        elif tokens and not (may_be_empty or (part is opening.validation and is_training)):
            needed = table.seq_len + 1 if table.packing == "concat" else 2
            raise DataError(
                f'the "{source.name}" source has {tokens} tokens for {source.split}; '
                f"a row needs {needed}",
                "give it more text, or lower data.seq_len",
            )


def _note(label: str, store: TokenStore) -> str:
    note = f"{label}: {store.num_tokens:,} tokens in {store.num_documents:,} documents"
    if store.skipped:
        note += f", {store.skipped:,} skipped, such as {store.faults[0]}"
    return note
