"""The samples of tasks whose samples are records, or items of a plugin's data set, by number."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import DataError, TrainerError
from ..sources.plugin_datasets import MapDataset
from .batch import IGNORED, Batch
from .collate import Arrays, Collation, Sample, make_keys
from .order import Indices, Order
from .samples import NumberedSamples, RowSource
from .tables import Data


class SampleSource(RowSource, Protocol):
    """A source whose rows are read as samples."""

    def read(self, rows: Indices) -> Sequence[Sample]:
        """Return the samples of these rows."""


@dataclass(frozen=True)
class Subset:
    """Some rows of a source.

    Attributes:
        source: the source.
        rows: the numbers of the rows in the source.
    """

    source: SampleSource
    rows: Indices

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def read(self, rows: Indices) -> Sequence[Sample]:
        """Return the samples of these rows of the subset."""
        return self.source.read(self.rows[rows])


@dataclass(frozen=True)
class DatasetRows:
    """The samples of a plugin's data set.

    Attributes:
        dataset: the data set.
        label: its name in messages.
    """

    dataset: MapDataset
    label: str

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def read(self, rows: Indices) -> Sequence[Sample]:
        """Return the samples of these rows.

        Raises:
            DataError: the data set raised an error, or a sample is not as expected.
        """
        return [self._read(int(row)) for row in rows]

    def _read(self, row: int) -> Sample:
        try:
            sample = self.dataset[row]
            return {str(name): np.asarray(value) for name, value in dict(sample).items()}
        except TrainerError:
            raise
        except Exception as error:  # a plugin's code raises anything
            raise DataError(
                f"{self.label}: sample {row}: {type(error).__name__}: {error}",
                "a sample is a mapping of arrays and numbers; --traceback shows where it failed",
            ) from error


@dataclass(frozen=True)
class CollatedRows:
    """A batch as arrays.

    Attributes:
        arrays: the fields of the batch, each with as many rows a sample.
        batch_class: the class of the batch.
    """

    arrays: Arrays
    batch_class: type[Batch]

    def to_batch(self) -> Batch:
        """Return a batch of tensors that share the arrays' memory."""
        columns = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return self.batch_class.from_columns(columns)

    def ignore(self, where: NDArray[np.bool_]) -> None:
        """Leave samples out of every count, by the field `is_valid` and by their labels."""
        rows = np.repeat(where, self.batch_class.rows_per_sample)
        self.arrays["is_valid"] = ~rows
        labels = self.arrays.get("labels")
        if labels is not None and labels.dtype.kind in "if":
            if len(labels) != len(rows):  # the labels of all positions, [1, T] or [T, ...]
                labels = labels[0] if len(labels) == 1 else labels
                rows = np.repeat(rows, self.arrays["lengths"])
            labels[rows] = IGNORED if labels.dtype.kind == "i" else np.nan


class RecordSamples(NumberedSamples):
    """Samples that are collated to batches.

    Args:
        sources: the sources.
        order: maps the number of a sample to its source and row.
        labels: the label of each source in metrics.
        collation: makes the batches.
        table: the `[data]` table.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource],
        order: Order,
        labels: Sequence[str],
        collation: Collation,
        table: Data,
    ) -> None:
        super().__init__(sources, order, labels)
        self.sources = sources
        self.collation = collation
        self.table = table

    def with_dropout(self, seed: int) -> Self:
        """Return samples whose batches have `sample_keys`; see `NumberedSamples.with_dropout`."""
        changed = copy(self)
        changed.collation = replace(self.collation, seed=seed)
        return changed

    def gather(self, samples: Indices) -> CollatedRows:
        """Return the samples of these numbers, [B], ascending."""
        add_partner, partners = self.collation.add_partner, samples ^ 1
        numbers = samples if add_partner is None else np.union1d(samples, partners)
        source, row = self.locate(numbers)
        found = self._read(source, row)
        if add_partner is not None:
            mine, others = (np.searchsorted(numbers, each) for each in (samples, partners))
            found = [add_partner(found[i], found[j]) for i, j in zip(mine, others, strict=True)]
            source = source[mine]
        length = self.collation.find_length(found, self.table.seq_len, self.table.pad_to)
        arrays = self.collation.collate(found, length)
        batch_class = self.collation.batch_class
        if self.separate_labels:
            arrays["sources"] = np.repeat(self.source_ids[source], batch_class.rows_per_sample)
        if self.collation.seed is not None:
            keys = make_keys(samples, self.collation.seed)
            arrays["sample_keys"] = np.repeat(keys, batch_class.rows_per_sample)
        return CollatedRows(arrays, batch_class)

    def _read(self, source: Indices, row: Indices) -> list[Sample]:
        """Read the rows of each source in one call, and restore the order of the samples."""
        if len(self.sources) == 1:
            return list(self.sources[0].read(row))
        found: list[Any] = [None] * len(row)
        for index in np.unique(source).tolist():
            mine = np.flatnonzero(source == index)
            samples = self.sources[index].read(row[mine])
            for place, sample in zip(mine.tolist(), samples, strict=True):
                found[place] = sample
        return found
