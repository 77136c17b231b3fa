"""The micro batches of a rank, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from ..core import faults
from .batch import Batch
from .order import Indices
from .samples import NumberedSamples, Rows
from .tables import Data
from .workers import prefetch_steps


class Loader:
    """One rank's micro batches.

    Global batch `g` is samples `[g * global_batch, (g + 1) * global_batch)`. Its micro batches are
    dealt to the ranks in turn, so that the samples of a step are the same for any number of ranks.

    Args:
        samples: the samples of the run.
        table: the `[data]` table.
        rank: the data-parallel rank.
        ranks: the number of data-parallel ranks; divides `global_batch`.
        take: selects what this rank needs of a micro batch that several ranks read.
    """

    def __init__(
        self,
        samples: NumberedSamples,
        table: Data,
        rank: int,
        ranks: int,
        take: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self.samples = samples
        self.take = take
        self.table = table
        self.rank = rank
        share = table.global_batch // ranks
        self.micro_batch = min(table.micro_batch, share)
        self.share = samples_of_rank(share, self.micro_batch, rank, ranks)

    def steps(self, first_step: int) -> Iterator[list[Batch]]:
        """Yield the micro batches of each optimizer step, from `first_step` on, without end.

        Raises:
            DataError: a token is outside the vocabulary, or a worker process failed.
        """
        steps: Iterator[Rows]
        if self.table.workers:
            timeout_seconds = self.table.worker_timeout_seconds
            steps = prefetch_steps(self.step, first_step, self.table.workers, timeout_seconds)
        else:
            steps = map(self.step, count(first_step))
        for rows in steps:
            yield [self.take(batch) for batch in rows.to_batch().split(self.micro_batch)]

    def step(self, step: int) -> Rows:
        """Return this rank's rows of one optimizer step."""
        # The step is the loader's whole position: a resumed run needs no other state of it.
        first = step * self.table.global_batch
        faults.point("data.read", self.rank, step + 1)
        # Of the whole global batch, not of this rank's share alone: the ranks of a machine then
        # need the same windows of a stream at about the same time.
        self.samples.ensure(first, first + self.table.global_batch)
        return self.samples.gather(first + self.share)


def samples_of_rank(share: int, micro_batch: int, rank: int, ranks: int) -> Indices:
    """Return which samples of a global batch are a rank's, [share], micro batch by micro batch.

    The last micro batch of each rank is smaller if `micro_batch` does not divide the share.
    """
    mine = np.arange(share)
    whole = share // micro_batch * micro_batch
    first = np.where(mine < whole, mine // micro_batch * micro_batch, whole)
    size = np.where(mine < whole, micro_batch, share - whole)
    sample: Indices = first * ranks + rank * size + (mine - first)
    return sample


def iterate_validation(
    samples: NumberedSamples, table: Data, steps: int, rank: int, ranks: int
) -> Iterator[Batch]:
    """Yield a rank's micro batches of the first `steps` global batches of the validation split.

    With 0 steps it is all of the split.

    Nothing counts twice. Every rank gets as many batches of the same size; where rows have run out,
    a batch repeats the last one, which is left out of all counts.
    """
    size = min(table.micro_batch, table.global_batch // ranks)
    total = samples.rows_per_epoch
    if steps:
        total = min(steps * table.global_batch, total)
    for number in range(-(-total // (size * ranks))):
        # A rank without rows repeats the last one, without labels: the forward pass has collectives
        # that need every rank.
        mine = np.arange(size) + (number * ranks + rank) * size
        rows = samples.gather(np.minimum(mine, total - 1))
        rows.ignore(mine >= total)
        yield rows.to_batch()
