"""The micro batches of a rank, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np

from ..core import faults
from .batch import Batch
from .dataset import Turns
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
        takes_whole_steps: give the rows of a step as one micro batch, as a pipeline takes them,
            which cuts them itself.
    """

    def __init__(
        self,
        samples: NumberedSamples,
        table: Data,
        rank: int,
        ranks: int,
        take: Callable[[Batch], Batch] = lambda batch: batch,
        *,
        takes_whole_steps: bool = False,
    ) -> None:
        self.samples = samples
        self.take = take
        self.table = table
        self.rank = rank
        share = table.global_batch // ranks
        self.micro_batch = share if takes_whole_steps else min(table.micro_batch, share)
        self.share = samples_of_rank(share, self.micro_batch, rank, ranks)

    def steps(self, first_step: int) -> Iterator[list[Batch]]:
        """Yield the micro batches of each optimizer step, from `first_step` on, without end.

        Raises:
            DataError: a token is outside the vocabulary, or a worker process failed.
        """
        for rows in read_steps(self.step, first_step, self.table):
            yield self.cut(rows)

    def cut(self, rows: Rows) -> list[Batch]:
        """Return this rank's rows of a step as micro batches."""
        return [self.take(batch) for batch in rows.to_batch().split(self.micro_batch)]

    def step(self, step: int) -> Rows:
        """Return this rank's rows of one optimizer step."""
        # The step is the loader's whole position: a resumed run needs no other state of it.
        first = step * self.table.global_batch
        faults.point("data.read", self.rank, step + 1)
        # Of the whole global batch, not of this rank's share alone: the ranks of a machine then
        # need the same windows of a stream at about the same time.
        self.samples.ensure(first, first + self.table.global_batch)
        return self.samples.gather(first + self.share)


class TurnLoader:
    """One rank's micro batches of all training splits.

    Args:
        turns: the splits.
        rank: the data-parallel rank.
        ranks: the number of data-parallel ranks.
        take: selects what this rank needs of a micro batch that several ranks read.
        takes_whole_steps: see `Loader`.
    """

    def __init__(
        self,
        turns: Turns,
        rank: int,
        ranks: int,
        take: Callable[[Batch], Batch] = lambda batch: batch,
        *,
        takes_whole_steps: bool = False,
    ) -> None:
        self.turns = turns
        whole = takes_whole_steps
        self.loaders = [
            Loader(turn.opened.train, turn.table, rank, ranks, take, takes_whole_steps=whole)
            for turn in turns.turns
        ]

    def steps(self, first_step: int) -> Iterator[list[Batch]]:
        """Yield the micro batches of each optimizer step, from a global batch on, without end.

        Raises:
            DataError: a token is outside the vocabulary, or a worker process failed.
        """
        steps = read_steps(self.step, first_step, self.loaders[0].table)
        for batch, rows in enumerate(steps, first_step):
            split, _ = self.turns.locate(batch)
            yield self.loaders[split].cut(rows)

    def step(self, batch: int) -> Rows:
        """Return this rank's rows of one global batch."""
        split, step = self.turns.locate(batch)
        return self.loaders[split].step(step)

    def describe_position(self, batches: int) -> dict[str, Any]:
        """Return what rows of metrics say of so many global batches: samples, and the last split's
        name if there are several.
        """
        split, _ = self.turns.locate(max(batches - 1, 0))
        name = {"split": self.turns.turns[split].name} if len(self.loaders) > 1 else {}
        return {"samples": self.turns.count_samples(batches), **name}

    def describe_samples(self, batch: int) -> dict[str, dict[str, list[int]]]:
        """Return the origin of a global batch's samples; see `NumberedSamples.describe`."""
        split, step = self.turns.locate(batch)
        loader = self.loaders[split]
        size = loader.table.global_batch
        return loader.samples.describe(step * size, size)

    def state(self, batch: int) -> dict[str, Any]:
        """Return what is needed to resume at a global batch, beside its number; JSON."""
        counts = zip(self.turns.turns, self.turns.count_steps(batch), strict=True)
        states = {
            turn.name: turn.opened.train.state(steps * turn.table.global_batch)
            for turn, steps in counts
        }
        return states.get("", states)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken."""
        for turn in self.turns.turns:
            turn.opened.train.restore(state.get(turn.name, {}) if turn.name else state)


def read_steps(read: Callable[[int], Rows], first_step: int, table: Data) -> Iterator[Rows]:
    """Yield `read(step)` for each step from `first_step` on, in workers if the table has some.

    Raises:
        DataError: a token is outside the vocabulary, or a worker process failed.
    """
    if not table.workers:
        return map(read, count(first_step))
    return prefetch_steps(read, first_step, table.workers, table.worker_timeout_seconds)


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
