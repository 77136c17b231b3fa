"""The order of samples: pure functions of the recipe, the seed and the sample's number.

Sample `n` of a run is found in constant time, so that the position in the data is one integer and
no rank, worker or resumed run needs to know what another one has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from ..core.hashing import GOLDEN, Words, mix

# The pattern of a mixture repeats after so many samples, so that a sample's row in its source
# follows by a division. Weights are rounded to multiples of 1/65536.
MIXTURE_PERIOD = 65536
ENDLESS = 2**62
"""rows of a stream, which has an order of its own"""
# uint64 as everything in `permute`: NumPy makes float64 of int64 with uint64, and loses bits.
ROUND_KEYS = [np.uint64(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(6)]

Indices = NDArray[np.int64]


def permute(index: Words, size: int, key: Words) -> Words:
    """Return where a pseudo-random permutation of `range(size)` sends each index.

    A generalised Feistel network over `left * width + right`, walked until it lands inside the
    range. It needs no memory, and every key gives another permutation.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3.

    Args:
        index: the indices, [N], each below `size`.
        size: the number of elements that are permuted.
        key: the key of the permutation for each index, [N].
    """
    # About a square, not a power of two: fewer than `height` of all values land outside the range,
    # and few have to be permuted again.
    height = isqrt(size - 1) + 1 if size > 1 else 1
    width = -(-size // height)
    left, right = index // np.uint64(width), index % np.uint64(width)
    for even, odd in zip(ROUND_KEYS[::2], ROUND_KEYS[1::2], strict=True):
        left = (left + mix(right + key + even)) % np.uint64(height)
        right = (right + mix(left + key + odd)) % np.uint64(width)
    sent = left * np.uint64(width) + right
    outside = np.flatnonzero(sent >= size)
    if outside.size:
        sent[outside] = permute(sent[outside], size, key[outside])
    return sent


def interleave(counts: Sequence[int], weights: Sequence[float]) -> tuple[Indices, Indices]:
    """Merge sources evenly: item `k` of a source comes at time `(k + 1/2) / weight`.

    Returns:
        the source of each item and its number in that source, both [sum(counts)].
    """
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    moment = (number + 0.5) / np.asarray(weights, dtype=np.float64)[source]
    # Stable, so that equal times come in one order on every machine and in every version of NumPy.
    merged = np.argsort(moment, kind="stable")
    return source[merged], number[merged]


def round_weights(weights: Sequence[float], total: int = MIXTURE_PERIOD) -> list[int]:
    """Round weights to counts that add up to `total`, each at least 1, by largest remainder."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    # A weight below 1/total was raised to 1; those above it make room.
    for index in np.argsort(counts - exact, kind="stable")[: max(total - counts.sum(), 0)]:
        counts[index] += 1
    while counts.sum() > total:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return [int(count) for count in counts]


def source_key(seed: int, index: int) -> int:
    """Return the key of a source's shuffle."""
    key: int = xxh3_64_intdigest(f"{seed} {index}".encode())
    return key


class TrainingOrder:
    """Mixes sources by weight without end, each in another random order every epoch.

    Args:
        rows: rows of each source.
        weights: share of each source.
        seed: other seeds give other orders.
        shuffle: False visits each source's rows in their own order.
    """

    def __init__(
        self, rows: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool
    ) -> None:
        self.rows = np.asarray(rows, dtype=np.int64)
        self.shuffle = shuffle
        self.keys = np.array([source_key(seed, index) for index in range(len(rows))], np.uint64)
        self.counts = np.array(round_weights(weights))
        self.slots = interleave(self.counts.tolist(), self.counts.tolist())

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the source and the row of each sample, both [N]."""
        source, epoch, index = self.locate_epochs(samples)
        if not self.shuffle:
            return source, index
        row = np.empty_like(index)
        for number, rows in enumerate(self.rows.tolist()):
            mine = np.flatnonzero(source == number)
            if rows == ENDLESS:  # a stream shuffles within its windows
                row[mine] = index[mine]
                continue
            key = mix(self.keys[number] + epoch[mine].astype(np.uint64) * GOLDEN)
            row[mine] = permute(index[mine].astype(np.uint64), rows, key)
        return source, row

    def locate_epochs(self, samples: Indices) -> tuple[Indices, Indices, Indices]:
        """Return the source of each sample, and its epoch and index in that source, each [N]."""
        period, slot = np.divmod(samples, MIXTURE_PERIOD)
        source = self.slots[0][slot]
        epoch, index = np.divmod(
            period * self.counts[source] + self.slots[1][slot], self.rows[source]
        )
        return source, epoch, index

    def count_rows(self, sample: int) -> Indices:
        """Return how many rows of each source the samples before this one have, [sources]."""
        # Whole periods have a fixed number of rows of each source: only the last one is counted.
        period, slot = divmod(sample, MIXTURE_PERIOD)
        counts: Indices = np.bincount(self.slots[0][:slot], minlength=len(self.rows))
        return period * self.counts + counts


class StorageOrder:
    """Each row once, source after source: the number of a sample is then that of a place on disk.

    Args:
        rows: rows of each source.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = np.asarray(rows, dtype=np.int64)
        self.starts = np.cumsum(self.rows) - self.rows

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the source and the row of each sample, both [N]."""
        samples = np.minimum(samples, self.rows.sum() - 1)
        source = np.searchsorted(self.starts, samples, side="right") - 1
        return source, samples - self.starts[source]

    def find(self, source: Indices, row: Indices) -> Indices:
        """Return the number of the sample at each source and row, [N]; the inverse of `locate`."""
        found: Indices = self.starts[source] + row
        return found


class ValidationOrder:
    """Mixes sources by weight, each row once, in the order of its source.

    Args:
        rows: rows of each source.
        weights: share of each source, until it is used up.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float]) -> None:
        self.rows = rows
        self.weights = weights
        self.total = sum(rows)

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the source and row of each sample, both [N]; past the end, those of the last."""
        samples = np.minimum(samples, self.total - 1)
        if len(self.rows) == 1:
            return np.zeros_like(samples), samples
        # The order of the first samples does not depend on the rows after them, so that a short
        # validation of a large split costs little.
        needed = int(samples.max()) + 1
        source, row = interleave([min(count, needed) for count in self.rows], self.weights)
        return source[samples], row[samples]


Order = TrainingOrder | ValidationOrder | StorageOrder
