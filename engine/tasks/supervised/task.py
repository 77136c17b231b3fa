"""Supervised training of any module: fields of a batch in, outputs out, and a criterion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...core.errors import DataError
from ...data.batch import Batch, SampleBatch
from ...data.collate import Arrays, Collation, Sample, stack_samples
from ...sources.configs import DatasetSource
from ..criteria import Fields
from ..sample_task import CriterionRecord, CriterionTask
from ..task import LossRecord


def make_collation(padding: Mapping[str, float]) -> Collation:
    """Return how samples of a data set become batches; see `Supervised.padding`."""
    return Collation(partial(_collate, padding=padding), SampleBatch)


def _collate(samples: Sequence[Sample], _length: int, padding: Mapping[str, float]) -> Arrays:
    arrays = stack_samples(samples, padding)
    # Python's floats are in double precision, and modules are in single precision.
    return {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in arrays.items()
    }


@dataclass(frozen=True, kw_only=True)
class SupervisedTask(CriterionTask[SampleBatch]):
    """Trains a module that takes the fields of a batch by name.

    Attributes:
        targets: fields that the module is not given.
        collation: makes batches of samples.
    """

    targets: frozenset[str]
    collation: Collation

    batch_class: ClassVar[type[Batch]] = SampleBatch

    def fields(self, batch: SampleBatch) -> Fields:
        """Return the fields of the samples that are not there to fill up a batch."""
        return {name: _select(value, batch.is_valid) for name, value in batch.fields.items()}

    def num_samples(self, batch: SampleBatch) -> int | Tensor:
        """Return how many samples are not there to fill up a batch."""
        return len(batch) if batch.is_valid is None else batch.is_valid.sum()

    def input(self, batch: SampleBatch) -> Tensor:
        """Return the first field that the module takes."""
        first: Tensor = next(iter(self.arguments(batch).values()))
        return first

    def arguments(self, batch: SampleBatch) -> dict[str, Any]:
        """Return the fields that the module takes."""
        return {name: x for name, x in batch.fields.items() if name not in self.targets}

    def record(self, batch: SampleBatch) -> CriterionRecord:
        """Return the criterion of the samples that are not there to fill up a batch."""
        select = partial(_select, is_valid=batch.is_valid)
        return CriterionRecord(self.loss, self.fields(batch), select)

    def forward(
        self, forward: Callable[..., Any], batch: SampleBatch, record: LossRecord
    ) -> Tensor:
        """Give the module its fields, and the criterion the outputs."""
        sums: Tensor = record(forward(**self.arguments(batch)))
        return sums

    def example(self, rows: int) -> SampleBatch:
        """Return the first sample of the first source, repeated.

        Raises:
            DataError: there is no data set, or it is empty.
        """
        sources = (each for each in self.data.sources if isinstance(each, DatasetSource))
        source = next(sources, None)
        dataset = source.build(source.split) if source else ()
        if not len(dataset):
            raise DataError("no data set tells the shapes of samples", "data.sources needs one")
        sample = {name: np.asarray(value) for name, value in dataset[0].items()}
        arrays = self.collation.collate([sample] * rows, 0)
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return SampleBatch.from_columns(columns)


def _select(value: Any, is_valid: Tensor | None) -> Any:
    """Return the rows of a tensor, or of each of a tuple's, that are valid."""
    if is_valid is None:
        return value
    if isinstance(value, Tensor):
        # Which rows these are is known on the device alone: the host waits, in validation only.
        return value[is_valid]
    return tuple(_select(each, is_valid) for each in value)
