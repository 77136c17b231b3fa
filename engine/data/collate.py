"""Makes one array a field of the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from .batch import Batch

Sample = Mapping[str, NDArray[Any]]
"""the arrays of one sample, or numbers, by field"""
Arrays = dict[str, NDArray[Any]]
"""an array with rows along dimension 0 for each field of a batch"""

# Odd numbers, so that their products mod 2**64 are a permutation (SplitMix64's constants).
KEY_STRIDE, KEY_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@dataclass(frozen=True)
class Collation:
    """How a task makes batches of samples.

    Attributes:
        collate: makes the arrays of a batch from its samples and the length to pad to, in tokens.
        batch_class: the class of the task's batches; `collate` gives its fields. All of them have
            as many rows a sample.
        length: returns the number of tokens of a sample; None: samples are not of tokens, and are
            not padded.
        seed: of the field `sample_keys` that the batches have; None: they have no such field.
        add_partner: adds to a sample what it needs of its partner; None: nothing. Samples 2 k and
            2 k + 1 of a run are partners, whichever ranks and micro batches they are in; the last
            one of a validation may be its own.
    """

    collate: Callable[[Sequence[Sample], int], Arrays]
    batch_class: type[Batch]
    length: Callable[[Any], int] | None = None
    seed: int | None = None
    add_partner: Callable[[Any, Any], Sample] | None = None

    def make_keys(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for each sample of a run, [B], from which random masks are drawn.

        It depends on the seed and on the sample's number in the run, which says the step too.
        """
        assert self.seed is not None, "only seeded batches have keys"
        start = np.uint64(self.seed * KEY_STRIDE % 2**64)
        return ((samples.astype(np.uint64) + start) * np.uint64(KEY_FACTOR)).view(np.int64)

    def find_length(self, samples: Sequence[Sample], seq_len: int, pad_to: int) -> int:
        """Return the length to which the samples of a step are padded.

        Args:
            samples: the samples of this rank.
            seq_len: the largest length.
            pad_to: the multiple to which the longest sample's length is rounded up; 0: `seq_len`.
        """
        if self.length is None or not pad_to:
            return seq_len
        longest = max(1, *map(self.length, samples))
        return min(-(-longest // pad_to) * pad_to, seq_len)


def pad_arrays(
    arrays: Iterable[NDArray[Any]], length: int, value: float, dtype: Any = np.int64
) -> NDArray[Any]:
    """Return 1-D arrays as the rows of one, [B, length], padded at the right.

    Args:
        arrays: the arrays, each of at most `length` values.
        length: the number of columns.
        value: fills the rows up.
        dtype: the dtype of the result; torch takes labels and token ids as int64.
    """
    rows = list(arrays)
    padded = np.full((len(rows), length), value, dtype=dtype)
    for row, array in zip(padded, rows, strict=True):
        row[: len(array)] = array
    return padded


def stack_samples(samples: Sequence[Sample], filler: Mapping[str, float]) -> Arrays:
    """Return each field of the samples of a data set as one array, [B, ...].

    Args:
        samples: the samples.
        filler: for fields whose first dimensions differ between samples, the value that fills
            shorter ones up to the longest.

    Raises:
        DataError: samples differ in their fields, or a field differs in its shape.
    """
    names = set(samples[0])
    for sample in samples:
        if set(sample) != names:
            other = ", ".join(sorted(names ^ set(sample)))
            raise DataError(f"samples of a data set differ in their fields: {other}")
    return {
        name: _stack([np.asarray(sample[name]) for sample in samples], name, filler)
        for name in samples[0]
    }


def _stack(arrays: list[NDArray[Any]], name: str, filler: Mapping[str, float]) -> NDArray[Any]:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 and name in filler and len({shape[1:] for shape in shapes}) == 1:
        longest = max(len(array) for array in arrays)
        stacked = np.full((len(arrays), longest, *arrays[0].shape[1:]), filler[name])
        stacked = stacked.astype(np.result_type(*arrays))
        for row, array in zip(stacked, arrays, strict=True):
            row[: len(array)] = array
        return stacked
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)[:2]))
        raise DataError(
            f'the field "{name}" of a data set has samples of shapes {listed}',
            "the samples of a batch are stacked: give them one shape, or name a filler for the "
            "field in `padding` of the source",
        )
    return np.stack(arrays)
