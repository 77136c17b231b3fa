"""The samples of a run by number: which source and which row, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from .batch import Batch, TokenBatch
from .collate import POSITION_STRIDE, make_keys
from .order import Indices, Order, StorageOrder, TrainingOrder, ValidationOrder
from .packing import Packed, PackedRows
from .stream import Stream

# Samples that are located at once beyond those asked for: NumPy's cost for the few samples of a
# step is mostly that of the calls.
LOCATE_AHEAD = 4096


class Rows(Protocol):
    """Samples as arrays, before they become a batch."""

    def to_batch(self) -> Batch:
        """Return a batch of tensors that share the arrays' memory."""

    def ignore(self, where: NDArray[np.bool_]) -> None:
        """Leave samples out of every count: they only give the batch its size.

        Args:
            where: [B]; True for the samples to leave out.
        """


class RowSource(Protocol):
    """A source whose rows are samples."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""


class NumberedSamples:
    """A run's samples, numbered from 0; a subclass reads the rows of the sources.

    Args:
        sources: the sources.
        order: maps the number of a sample to its source and row.
        labels: the label of each source in metrics.

    Attributes:
        separate_labels: the labels of the sources whose losses are logged apart; none if there is
            one source.
        source_ids: the number that batches have for each source: of its label among these.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        order: Order,
        labels: Sequence[str] = (),
    ) -> None:
        self.order = order
        self.labels = labels
        self.separate_labels = labels if len(labels) > 1 else ()
        self.source_ids = np.arange(len(sources))
        self.rows_per_epoch = sum(source.num_rows for source in sources)
        self._located_from = 0
        self._located = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def among(self, labels: Sequence[str]) -> Self:
        """Return the same samples, with the sources numbered as in a longer list of labels."""
        renumbered = copy(self)
        renumbered.separate_labels = labels if len(labels) > 1 else ()
        renumbered.source_ids = np.array([labels.index(label) for label in self.labels])
        return renumbered

    def with_dropout(self, seed: int) -> Self:
        """Return the same samples, whose batches have keys from which dropout draws.

        Args:
            seed: other seeds draw other numbers.
        """
        raise NotImplementedError

    def each_once(self) -> Self:
        """Return the same samples, each once and in the order of its source, for a validation."""
        assert not isinstance(self.order, StorageOrder), "no samples start with it"
        weights = self.order.counts if isinstance(self.order, TrainingOrder) else self.order.weights
        rows = [int(count) for count in self.order.rows]
        return self._arrange(ValidationOrder(rows, list(weights)))

    def in_storage_order(self) -> Self:
        """Return the same samples, each once, source after source."""
        return self._arrange(StorageOrder([int(count) for count in self.order.rows]))

    def _arrange(self, order: ValidationOrder | StorageOrder) -> Self:
        arranged = copy(self)
        arranged.order = order
        arranged._located = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        return arranged

    def ensure(self, first: int, stop: int) -> None:
        """Make samples `first` to `stop - 1` ready; those before are not needed any more."""

    def gather(self, samples: Indices) -> Rows:
        """Return the samples of these numbers, [B], ascending.

        Raises:
            DataError: a sample cannot be read.
        """
        raise NotImplementedError

    def batch(self, first: int, count: int) -> Batch:
        """Return samples `first` to `first + count - 1`."""
        self.ensure(first, first + count)
        return self.gather(np.arange(first, first + count)).to_batch()

    def describe(self, first: int, count: int) -> dict[str, dict[str, list[int]]]:
        """Return the origin of samples: for each source the numbers of samples, epochs and rows.

        A row is counted within its source, in the order of the source's documents; in a stream
        within the order in which it is read.
        """
        assert isinstance(self.order, TrainingOrder), "a validation has no epochs"
        samples = np.arange(first, first + count)
        source, epoch, _ = self.order.locate_epochs(samples)
        columns = {"samples": samples, "epochs": epoch, "rows": self.order.locate(samples)[1]}
        return {
            self.labels[which]: {
                key: column[source == which].tolist() for key, column in columns.items()
            }
            for which in np.unique(source)
        }

    def state(self, sample: int) -> dict[str, Any]:
        """Return what is needed to resume at a sample, beside its number; JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken."""

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the source and row of each sample, ascending; thousands are computed at a time."""
        first, last = int(samples[0]), int(samples[-1])
        known = self._located_from
        if not (known <= first and last < known + len(self._located[0])):
            ahead = np.arange(first, last + 1 + LOCATE_AHEAD)
            self._located = self.order.locate(ahead)
            self._located_from = known = first
        return self._located[0][samples - known], self._located[1][samples - known]


class Samples(NumberedSamples):
    """The samples of a language model: rows of tokens.

    Args:
        sources: the packed sources.
        order: maps the number of a sample to its source and row.
        vocab_size: the size of the vocabulary, which every token must be below.
        labels: the label of each source in metrics.
    """

    def __init__(
        self,
        sources: Sequence[Packed],
        order: Order,
        vocab_size: int,
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__(sources, order, labels)
        self.sources = sources
        self.vocab_size = vocab_size
        self.dropout_seed: int | None = None

    def with_dropout(self, seed: int) -> Self:
        """Return samples whose batches have keys; see `NumberedSamples.with_dropout`."""
        changed = copy(self)
        changed.dropout_seed = seed
        return changed

    def batch(self, first: int, count: int) -> TokenBatch:
        """Return samples `first` to `first + count - 1`."""
        self.ensure(first, first + count)
        return self.gather(np.arange(first, first + count)).to_batch()

    def gather(self, samples: Indices) -> PackedRows:
        """Return the samples of these numbers, [B], ascending.

        Raises:
            DataError: a token is outside the vocabulary: the stored tokens are damaged.
        """
        source, row = self.locate(samples)
        alone = len(self.sources) == 1
        rows = self.sources[0].gather(row) if alone else self._merge(source, row)
        self._check_vocabulary(rows, source)
        if self.dropout_seed is not None:
            rows = rows._replace(dropout_keys=_draw_keys(rows, samples, self.dropout_seed))
        return rows._replace(sources=self.source_ids[source]) if self.separate_labels else rows

    def _check_vocabulary(self, rows: PackedRows, source: Indices) -> None:
        # Checked here: on a GPU a token out of range is a device-side assertion that names no file.
        # The maxima of all rows are cheap; which row it was is looked up only if there is one.
        largest = max(rows.tokens.max(), rows.labels.max())
        if largest >= self.vocab_size:
            outside = rows.largest_tokens() >= self.vocab_size
            store = self.sources[source[outside][0]].store
            raise DataError(
                f"{store.place}: holds token {largest}; "
                f"the tokenizer's vocabulary has {self.vocab_size}",
                "the files are damaged: delete them and prepare them again",
            )

    def _merge(self, source: Indices, row: Indices) -> PackedRows:
        """Gather the rows of each source in one call, and restore the order of the samples."""
        order = np.argsort(source, kind="stable")
        which, starts = np.unique(source[order], return_index=True)
        groups = np.split(row[order], starts[1:])
        rows = PackedRows.concatenate(
            self.sources[index].gather(group) for index, group in zip(which, groups, strict=True)
        )
        # The inverse of the permutation `order`.
        return rows.select(np.argsort(order))


def _draw_keys(rows: PackedRows, samples: Indices, seed: int) -> Indices:
    """Return a number for each position of rows, from which dropout draws; flat if rows are.

    It depends on the number of the sample and on the position in the row alone.
    """
    keys = make_keys(samples, seed)
    if rows.lengths is None:
        places, keys = np.arange(rows.tokens.shape[1]), keys[:, None]
    else:
        assert rows.positions is not None, "flat rows have them"
        places, keys = rows.positions, np.repeat(keys, rows.lengths)
    drawn: Indices = keys + places * POSITION_STRIDE
    return drawn


class TrainingSamples(Samples):
    """Samples without end, some of which may come from streams."""

    order: TrainingOrder

    @cached_property
    def streams(self) -> dict[int, Stream]:
        """The sources that are tokenised while training, by index."""
        return {index: each for index, each in enumerate(self.sources) if isinstance(each, Stream)}

    def ensure(self, first: int, stop: int) -> None:
        """Make the rows of streams ready.

        Raises:
            DataError: a document cannot be read.
        """
        if self.streams:
            begins, ends = self.order.count_rows(first), self.order.count_rows(stop)
            for index, stream in self.streams.items():
                stream.ensure(int(begins[index]), int(ends[index]))

    def state(self, sample: int) -> dict[str, Any]:
        """Return what the streams need to resume at a sample that is ready; JSON."""
        drawn = self.order.count_rows(sample)
        return {
            stream.name: stream.state(int(drawn[index])) for index, stream in self.streams.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken."""
        for stream in self.streams.values():
            if stream.name in state:
                stream.restore(state[stream.name])
