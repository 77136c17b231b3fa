"""Weighted means of numbers over batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels.summation import sum_dtype


class MeanMeters:
    """Weighted means by name, whose sums over all ranks travel in one all-reduce.

    A number that is NaN does not count, and neither does its weight.

    Args:
        names: names of the means, the same on all ranks.
        device: where numbers are added up.
        num_extra: how many further sums travel with them, in `extra`.
    """

    def __init__(self, names: Sequence[str], device: torch.device, num_extra: int = 0) -> None:
        self._names = list(names)
        size = 2 * len(self._names) + num_extra
        # fp64, in which counts of up to 2**53 are exact.
        self._sums = torch.zeros(size, dtype=sum_dtype(device), device=device)
        self._means = self._sums[: 2 * len(self._names)].view(-1, 2)
        self.extra = self._sums[2 * len(self._names) :]

    @torch.no_grad()
    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a number of this rank, without waiting for the device.

        Args:
            name: which mean.
            value: a number, or a tensor of numbers.
            weight: how much it counts, such as its tokens; a tensor like `value`, or one for all.
        """
        device = self._sums.device
        values = torch.as_tensor(value, dtype=self._sums.dtype, device=device)
        weights = torch.as_tensor(weight, dtype=self._sums.dtype, device=device).expand_as(values)
        weights = weights.masked_fill(values.isnan(), 0)
        total = (values.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) * weights).sum()
        self._means[self._names.index(name)] += torch.stack([total, weights.sum()])

    def reduce(self) -> dict[str, float]:
        """Return the means over all ranks, which all call it; NaN for a mean of nothing.

        `extra` then has the sums over all ranks.
        """
        if dist.is_initialized():
            dist.all_reduce(self._sums)
        totals, weights = self._means.unbind(1)
        return dict(zip(self._names, (totals / weights).tolist(), strict=True))

    def clear(self) -> None:
        """Set all sums to zero."""
        self._sums.zero_()
