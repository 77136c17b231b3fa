"""Samples with the outputs of a frozen model beside them, which were computed before training."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from ..corpus.output_store import OutputStore
from .batch import Batch
from .collate import Arrays
from .order import Indices, StorageOrder
from .samples import NumberedSamples, Rows


@dataclass(frozen=True)
class PrecomputedRows:
    """A batch as arrays, and the outputs of a frozen model for it.

    Attributes:
        rows: the samples.
        outputs: further fields of the batch, [B, rows a sample, ...].
        batch_class: the class of the batch.
    """

    rows: Rows
    outputs: Arrays
    batch_class: type[Batch]

    def to_batch(self) -> Batch:
        """Return a batch of tensors that share the arrays' memory."""
        batch = self.rows.to_batch()
        columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
        for name, array in self.outputs.items():
            flat = array.reshape(-1, *array.shape[2:])
            if batch.ragged and flat.ndim > 1:  # a value for each position, and not for each row
                lengths = np.array(batch.ragged.lengths)
                flat = flat[np.arange(flat.shape[1]) < lengths[:, None]][None]
            columns[name] = torch.from_numpy(flat)
        # A ragged batch has a class of its own.
        batch_class = type(batch) if isinstance(batch, self.batch_class) else self.batch_class
        return batch_class(**columns)

    def ignore(self, where: NDArray[np.bool_]) -> None:
        """Leave samples out of every count; see `Rows.ignore`."""
        self.rows.ignore(where)


class PrecomputedSamples(NumberedSamples):
    """Samples with outputs of a frozen model, which are found by source and row.

    Args:
        samples: the samples, none of them from a stream.
        store: the outputs, in `StorageOrder`.
        batch_class: the class of the task's batches, which have fields for the outputs.
    """

    def __init__(
        self, samples: NumberedSamples, store: OutputStore, batch_class: type[Batch]
    ) -> None:
        super().__init__((), samples.order, samples.labels)
        self.rows_per_epoch = samples.rows_per_epoch
        self._samples = samples
        self._store = store
        self._batch_class = batch_class
        self._places = StorageOrder([int(count) for count in samples.order.rows])

    def gather(self, samples: Indices) -> PrecomputedRows:
        """Return the samples of these numbers, [B], ascending."""
        places = self._places.find(*self._samples.locate(samples))
        rows = self._samples.gather(samples)
        return PrecomputedRows(rows, self._store.read(places), self._batch_class)
