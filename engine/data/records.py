"""Opens the sources of a task whose samples are records, or items of a plugin's data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, Problem, RecipeError
from ..corpus.cache import cache_folder
from ..corpus.checksums import ALONE, Share, require_intact
from ..corpus.records.encode_records import RecordEncoding, RecordPreparation, open_or_encode
from ..corpus.records.record_manifest import RecordManifest
from ..sources.configs import SourceConfig
from ..sources.plugin_datasets import DatasetSource
from ..tokenizers.tokenizer import Tokenizer
from .collate import Collation
from .dataset import OpenedData
from .order import Indices, TrainingOrder, ValidationOrder, permute
from .record_samples import DatasetRows, RecordSamples, SampleSource, Subset
from .tables import Data

# The same records are held out whatever the seed, so that the losses of runs can be compared.
HELD_OUT_KEY = 0x5EED


@dataclass
class _Split:
    """The sources of one split, their weights, and their labels in metrics."""

    sources: list[SampleSource] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def add(self, rows: SampleSource, source: SourceConfig, label: str) -> None:
        self.sources.append(rows)
        self.weights.append(source.weight)
        self.labels.append(label)

    @property
    def rows(self) -> list[int]:
        return [source.num_rows for source in self.sources]


@dataclass(frozen=True)
class RecordOpener:
    """Opens the `[data]` table of a task whose samples are not rows of tokens.

    Attributes:
        table: the `[data]` table.
        tokenizer: the recipe's tokenizer.
        collation: makes the batches.
        encoding: makes arrays of records; None: the task takes only data sets of plugins.
        share: the processes that divide the comparison of files with their checksums.
    """

    table: Data
    tokenizer: Tokenizer
    collation: Collation
    encoding: RecordEncoding | None = None
    share: Share = ALONE

    def open_data(self, seed: int) -> OpenedData:
        """Open, or encode once, every source, and hold records out for validation.

        Args:
            seed: the seed of the order of samples.

        Raises:
            RecipeError: a source gives no samples of this task.
            DataError: a source cannot be read, is damaged, or holds nothing.
            EnvironmentFault: the cache cannot be written.
        """
        table, cache = self.table, cache_folder(self.table.cache_dir)
        held_out = any(source.split == "validation" for source in table.sources)
        # A source that is meant for validation replaces what is held out of the others.
        fraction = 0.0 if held_out else table.validation_fraction
        train, validation = _Split(), _Split()
        fingerprint: dict[str, Any] = {}
        notes = []
        for index, (source, label) in enumerate(zip(table.sources, table.labels, strict=True)):
            rows, content, note = self._open(source, label, index, cache)
            fingerprint[f"{index}.{source.name}"] = {"records": rows.num_rows, "xxh3": content}
            notes.append(note)
            if source.split == "validation":
                validation.add(rows, source, label)
                continue
            kept, others = split_rows(rows.num_rows, fraction)
            train.add(Subset(rows, kept) if len(others) else rows, source, label)
            if len(others):
                validation.add(Subset(rows, others), source, label)
        if not train.sources:
            raise DataError('no source has split = "train"', "data.sources needs one")
        order = TrainingOrder(train.rows, train.weights, seed, shuffle=table.shuffle)
        samples = self._samples(train, order)
        if not validation.sources:
            return OpenedData(samples, None, fingerprint, notes)
        each_once = ValidationOrder(validation.rows, validation.weights)
        return OpenedData(samples, self._samples(validation, each_once), fingerprint, notes)

    def _samples(self, split: _Split, order: TrainingOrder | ValidationOrder) -> RecordSamples:
        return RecordSamples(split.sources, order, split.labels, self.collation, self.table)

    def _open(
        self, source: SourceConfig, label: str, index: int, cache: Path
    ) -> tuple[SampleSource, str, str]:
        """Return the samples of a source, a hash of them, and a sentence for the user."""
        if isinstance(source, DatasetSource):
            rows = DatasetRows(source.build(source.split), label)
            if not rows.num_rows:
                raise DataError(f"{label}: the data set is empty")
            content = xxh3_128_hexdigest(source.fingerprint().encode())
            return rows, content, f"{label}: {rows.num_rows:,} samples"
        if self.encoding is None:
            raise self._refuse(source, index, "gives no samples", "name a plugin's data set")
        prepared = source.for_fields(self.encoding.fields)
        if prepared.is_streamed:
            raise self._refuse(source, index, "is a stream", "set streaming = false")
        prepared = prepared.for_tokenizer(self.tokenizer)
        table = self.table
        job = RecordPreparation(
            prepared, self.tokenizer, self.encoding, table.seq_len, table.on_long
        )
        store = open_or_encode(job, cache)
        require_intact(store.folder, cache, self.share, store.manifest.files)
        return store, store.manifest.fingerprint, f"{label}: {_count(store.manifest)}"

    def _refuse(self, source: SourceConfig, index: int, reason: str, hint: str) -> RecipeError:
        problem = Problem(f'"{source.name}" {reason}', f"data.sources.{index}", hint=hint)
        return RecipeError([problem])


def split_rows(num_rows: int, fraction: float) -> tuple[Indices, Indices]:
    """Return the rows to train on and those that are held out, both ascending.

    Held-out rows are a random sample, because a file may be sorted by its labels; at least one, if
    two rows are there.
    """
    count = max(round(num_rows * fraction), 1) if fraction and num_rows > 1 else 0
    index = np.arange(num_rows, dtype=np.uint64)
    key = np.full(num_rows, HELD_OUT_KEY, dtype=np.uint64)
    mixed = permute(index, num_rows, key).astype(np.int64) if count else index.astype(np.int64)
    return np.sort(mixed[: num_rows - count]), np.sort(mixed[num_rows - count :])


def _count(manifest: RecordManifest) -> str:
    counts: Sequence[tuple[int, str]] = (
        (manifest.truncated, "cut to data.seq_len"),
        (manifest.dropped, "longer than data.seq_len left out"),
        (manifest.skipped, f"skipped, such as {manifest.faults[0] if manifest.faults else ''}"),
    )
    notes = [f"{manifest.num_records:,} records"]
    return ", ".join(notes + [f"{count:,} {what}" for count, what in counts if count])
