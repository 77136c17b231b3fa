"""Supervised training of any module: fields of a batch in, outputs out, and a criterion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ....kernels.ragged.lengths import SampleLengths
from ....kernels.ragged.samples import repeat_for_positions
from ...core.errors import DataError
from ...data.batch import Batch, RaggedSamples, SampleBatch
from ...data.collate import Arrays, Collation, Sample, concatenate_samples, stack_samples
from ...sources.plugin_datasets import DatasetSource
from ..criteria import Fields
from ..metrics.tables import Outputs
from ..outputs import KeptOutputs
from ..predictions import list_outputs
from ..sample_task import CriterionRecord, CriterionTask
from ..task import LossRecord


def make_collation(padding: Mapping[str, float], ragged: Sequence[str] = ()) -> Collation:
    """Return how samples of a data set become batches; see the fields of `Supervised`."""
    collate = partial(_collate, padding=padding, ragged=ragged)
    return Collation(collate, RaggedSamples if ragged else SampleBatch)


def _collate(
    samples: Sequence[Sample], _length: int, padding: Mapping[str, float], ragged: Sequence[str]
) -> Arrays:
    flat = concatenate_samples(samples, ragged) if ragged else {}
    others = [{name: x for name, x in each.items() if name not in ragged} for each in samples]
    arrays = {**flat, **stack_samples(others, padding)}
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
        class_dim: the dimension of the outputs that the criterion gets as the last one.
        collation: makes batches of samples.
    """

    targets: frozenset[str]
    class_dim: int = -1
    collation: Collation

    batch_class: ClassVar[type[Batch]] = SampleBatch

    def fields(self, batch: SampleBatch) -> Fields:
        """Return the fields of the samples that are not there to fill up a batch."""
        # The lengths first: criteria count the samples of the first field.
        fields = {**_lengths(batch), **batch.fields}
        return {name: _select(value, batch) for name, value in fields.items()}

    def num_samples(self, batch: SampleBatch) -> int | Tensor:
        """Return how many samples are not there to fill up a batch."""
        return len(batch) if batch.is_valid is None else batch.is_valid.sum()

    def input(self, batch: SampleBatch) -> Tensor:
        """Return the first field that the module takes."""
        first: Tensor = next(iter(self.arguments(batch).values()))
        return first

    def arguments(self, batch: SampleBatch) -> dict[str, Any]:
        """Return the fields that the module takes, and the lengths of samples, if they differ."""
        fields = {name: x for name, x in batch.fields.items() if name not in self.targets}
        return fields | _lengths(batch)

    def record(self, batch: SampleBatch) -> CriterionRecord:
        """Return the criterion of the samples that are not there to fill up a batch."""
        select = partial(_select, batch=batch)
        return CriterionRecord(
            self.loss, self.fields(batch), lambda x: self._move_classes(select(x))
        )

    def _move_classes(self, outputs: Any) -> Any:
        if self.class_dim == -1 or not isinstance(outputs, Tensor):
            return outputs
        return outputs.movedim(self.class_dim, -1)

    def predict(
        self, batch: SampleBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the outputs of each sample as lists, also where each position has outputs."""
        assert isinstance(record, KeptOutputs), "output_record returns one"
        rows = list_outputs(self._move_classes(record.outputs), meaning)
        if batch.ragged is None or len(rows) == len(batch):
            return rows
        return [
            {name: [row[name] for row in rows[start:stop]] for name in rows[0]}
            for start, stop in pairwise(batch.ragged.starts)
        ]

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
        columns: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if "lengths" in columns and self.collation.batch_class is RaggedSamples:
            columns["lengths"] = arrays["lengths"]  # a simulation has no values in tensors
        batch: SampleBatch = self.collation.batch_class.from_columns(columns)  # type: ignore[assignment] # its own class
        return batch


def _lengths(batch: SampleBatch) -> dict[str, Any]:
    return {"lengths": batch.ragged} if batch.ragged else {}


def _select(value: Any, batch: SampleBatch) -> Any:
    """Return the rows of a tensor, or of each of a tuple's, that are valid."""
    is_valid, lengths = batch.is_valid, batch.ragged
    if is_valid is None:
        return value
    # Which rows these are is known on the device alone: the host waits, in validation only.
    if isinstance(value, SampleLengths):
        return value.mask(is_valid.tolist())
    if not isinstance(value, Tensor):
        return tuple(_select(each, batch) for each in value)
    if lengths and len(value) == lengths.total:
        is_valid = repeat_for_positions(is_valid, lengths)
    return value[is_valid]
