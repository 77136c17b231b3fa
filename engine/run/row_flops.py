"""The FLOPs of rows of unequal lengths, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..assemble.assemble import Assembled
from ..data.batch import Batch
from ..lora.sizes import flops_per_token


class RowFlops:
    """Counts the FLOPs of training on rows of unequal lengths, whose number does not tell them.

    Args:
        parts: the parts of the run.
        group: a gloo group of all ranks; None for one process.
    """

    def __init__(self, parts: Assembled, group: ProcessGroup | None) -> None:
        passes, model, config = parts.step.task.passes, parts.model, parts.model_config
        self._count_row = lru_cache(maxsize=None)(
            lambda length: passes * length * flops_per_token(model, config, length)
        )
        self._group = group
        # Ranks of the other axes have the same rows.
        self._copies = parts.degrees.world // parts.degrees.data
        self._new, self._all, self._steps = 0.0, 0.0, 0
        self._total = 0.0

    @property
    def mean_step(self) -> float:
        """Operations of this rank in a step, a mean over all steps so far."""
        return self._all / max(self._steps, 1)

    def add(self, batches: Sequence[Batch]) -> None:
        """Count this rank's batches of a step."""
        flops = sum(map(self._count_row, chain.from_iterable(map(_row_lengths, batches))))
        flops /= self._copies
        self._new, self._all, self._steps = self._new + flops, self._all + flops, self._steps + 1

    def sum_over_ranks(self) -> None:
        """Add up what ranks have counted; all call it together, without waiting for the device."""
        total = torch.tensor(self._new, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        self._total, self._new = total.item(), 0.0

    def take(self) -> float:
        """Return the operations that `sum_over_ranks` found, and forget all that was counted."""
        total, self._total, self._new = self._total, 0.0, 0.0
        return total


def _row_lengths(batch: Batch) -> Sequence[int]:
    """Return the length of each row: where rows are padded, that of the longest one."""
    if batch.ragged:
        return batch.ragged.lengths
    rows, length = next(x.shape[:2] for x in batch.columns().values() if x.ndim > 1)
    return [length] * rows
