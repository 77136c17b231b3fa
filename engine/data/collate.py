"""Makes one array a field of the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
# None of the numbers in `layers.dropout.drop`, so that positions and columns do not meet.
POSITION_STRIDE = 0x2545F4914F6CDD1D


@dataclass(frozen=True)
class Collation:
    """How a task makes batches of samples.

    Attributes:
        collate: makes the arrays of a batch from its samples and the length to pad to, in tokens.
        batch_class: the class of the task's batches; `collate` gives its fields. All of them have
            as many rows a sample.
        length: returns the number of tokens of a sample; None: samples are not of tokens, and are
            not padded.
        seed: of the field `sample_keys` that the batches have, see `make_keys`; None: they have no
            such field.
        add_partner: adds to a sample what it needs of its partner; None: nothing. Samples 2 k and
            2 k + 1 of a run are partners, whichever ranks and micro batches they are in; the last
            one of a validation may be its own.
    """

    collate: Callable[[Sequence[Sample], int], Arrays]
    batch_class: type[Batch]
    length: Callable[[Any], int] | None = None
    seed: int | None = None
    add_partner: Callable[[Any, Any], Sample] | None = None

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


def make_keys(samples: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return a number for each sample of a run, [B], from which random masks are drawn.

    It depends on the seed and on the sample's number in the run, which says the step too.
    """
    start = np.uint64(seed * KEY_STRIDE % 2**64)
    return ((samples.astype(np.uint64) + start) * np.uint64(KEY_FACTOR)).view(np.int64)


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


def concatenate_samples(samples: Sequence[Sample], names: Sequence[str]) -> Arrays:
    """Return fields whose samples have a number of positions of their own as flat arrays.

    Args:
        samples: the samples.
        names: the fields, [L, ...] with the same L in a sample.

    Returns:
        each field, [T, ...]: the positions of all samples, one after the other; and `lengths` [B].

    Raises:
        DataError: a sample lacks a field, or its fields do not have the same number of positions.
    """
    hint = "fields of task.ragged have the same number of positions in a sample, 1 at least"
    for sample in samples:
        shapes = {name: np.shape(sample[name]) if name in sample else None for name in names}
        sizes = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(sizes) > 1 or 0 in sizes:
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise DataError(f"a sample of a data set has fields of shapes {listed}", hint)
        if "lengths" in sample:
            raise DataError(
                'a data set has a field "lengths", which is the name of the lengths of samples',
                "give the field another name, or leave out task.ragged",
            )
    flat = {name: [np.asarray(sample[name]) for sample in samples] for name in names}
    for name, pieces in flat.items():
        _require_one_shape({piece.shape[1:] for piece in pieces}, name, "positions have one shape")
    lengths = np.array([len(piece) for piece in flat[names[0]]], dtype=np.int64)
    return {**{name: np.concatenate(pieces) for name, pieces in flat.items()}, "lengths": lengths}


def _stack(arrays: list[NDArray[Any]], name: str, filler: Mapping[str, float]) -> NDArray[Any]:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 and name in filler and len({shape[1:] for shape in shapes}) == 1:
        longest = max(len(array) for array in arrays)
        stacked = np.full((len(arrays), longest, *arrays[0].shape[1:]), filler[name])
        stacked = stacked.astype(np.result_type(*arrays))
        for row, array in zip(stacked, arrays, strict=True):
            row[: len(array)] = array
        return stacked
    hint = "the samples of a batch are stacked: give them one shape, or name a filler for the field"
    _require_one_shape(shapes, name, f"{hint} in task.padding, or name the field in task.ragged")
    return np.stack(arrays)


def _require_one_shape(shapes: Collection[tuple[int, ...]], name: str, hint: str) -> None:
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)[:2]))
        raise DataError(f'the field "{name}" of a data set has samples of shapes {listed}', hint)
