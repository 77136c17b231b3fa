"""Classes that are divided over the ranks of the tensor axis, for log-probabilities of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.vocabulary import VocabularyShard
from ..collectives import all_gather_no_grad

CLASSES = 1


@dataclass(frozen=True)
class SplitVocabulary(VocabularyShard):
    """The classes whose rows of the head's weight this rank holds.

    Attributes:
        first: the class of the first row.
        group: process group of the tensor axis.
    """

    group: ProcessGroup | None = None

    def max_(self, x: Tensor) -> Tensor:
        """Replace values by their maximum over the group, in place, and return them."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """Replace values by their sum over the group, in place, and return them."""
        dist.all_reduce(x, group=self.group)
        return x

    def locate(self, classes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return the column of each class, 0 where another rank has it, and whether it is here."""
        column = classes - self.first
        is_here = (column >= 0) & (column < columns)
        return column.where(is_here, 0), is_here

    def top_k(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of all ranks' values [T, V], and the classes that have them."""
        assert self.group is not None
        own = values.topk(min(k, values.shape[CLASSES]))
        # An all-gather takes parts of equal size, and a rank may hold fewer than k classes.
        missing = (0, k - own.values.shape[CLASSES])
        largest = F.pad(own.values, missing, value=-torch.inf)
        classes = F.pad(own.indices + self.first, missing)
        everyones = all_gather_no_grad(largest, CLASSES, self.group).topk(k)
        gathered = all_gather_no_grad(classes, CLASSES, self.group)
        return everyones.values, gathered.gather(CLASSES, everyones.indices)
