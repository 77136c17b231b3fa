"""Histograms of weights, gradients and updates, of each layer or parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels.summation import sum_dtype, widen
from ...core.local import local
from ..numbers import Histogram, Number
from ..tables import HistogramKind, Histograms, Monitor
from .monitored_model import MonitoredModel

KEYS: dict[HistogramKind, str] = {
    "weights": "weight_histogram",
    "gradients": "grad_histogram",
    "updates": "update_histogram",
}
CHUNK = 2**20
"""values that are counted at once, which bounds the memory that this takes to some 50 MB"""
LANES = 512
"""copies of the bins on a GPU, so that not all threads wait to add to the same ones"""


class HistogramMonitor(Monitor):
    """Counts values in bins between the smallest and the largest value of all ranks.

    Each value of a parameter counts once, whatever shards of it the ranks hold. The edges of the
    bins and the bin of each value are computed in fp64, as `numpy.histogram` does.

    Args:
        model: what is measured.
        config: which values, of which parameters, in how many bins.
    """

    def __init__(self, model: MonitoredModel, config: Histograms) -> None:
        self._groups, self._weights, self._places = model.group(
            config.match, by_layer=config.by == "layer"
        )
        self._shares = [model.share(weight) for weight in self._weights]
        self._kinds, self._bins = config.of, config.bins
        self._ranges: dict[HistogramKind, tuple[Tensor, Tensor]] = {}
        self._old: list[Tensor] = []
        self.num_sums = len(self._kinds) * len(self._groups) * (self._bins + 1)

    def before_update(self, sums: Tensor, clip_factor: Tensor | None) -> None:
        """Count weights and gradients, and copy the weights for the updates."""
        parts = [local(weight) for weight in self._weights]
        if "weights" in self._kinds:
            self._measure("weights", parts, sums)
        if "gradients" in self._kinds:
            gradients = [weight.grad for weight in self._weights]
            known = [torch.empty(0) if grad is None else local(grad) for grad in gradients]
            self._measure("gradients", known, sums)
            if clip_factor is not None:
                low, high = (end / clip_factor for end in self._ranges["gradients"])
                self._ranges["gradients"] = low, high
        if "updates" in self._kinds:
            self._old = [part.clone() for part in parts]

    def after_update(self, sums: Tensor) -> None:
        """Count the differences between the weights and their copies."""
        if "updates" in self._kinds:
            for old, weight in zip(self._old, self._weights, strict=True):
                # In place: differences beside the copies would double the memory.
                old.sub_(local(weight)).neg_()
            self._measure("updates", self._old, sums)
            self._old = []

    def metrics(self, sums: Tensor) -> dict[str, Number]:
        """Return `weight_histogram/LAYER` and the other histograms."""
        counts = sums.view(len(self._kinds), len(self._groups), -1)
        return {
            f"{KEYS[kind]}/{group}": Histogram(low, high, row)
            for kind, rows in zip(self._kinds, counts, strict=True)
            for group, row, low, high in zip(self._groups, rows, *self._ranges[kind], strict=True)
        }

    def _measure(self, kind: HistogramKind, parts: Sequence[Tensor], sums: Tensor) -> None:
        """Find the range of each group over all ranks, and count this rank's share of it."""
        low, high = self._ranges[kind] = self._find_ranges(parts, sums.device)
        counts = sums.view(len(self._kinds), len(self._groups), -1)[self._kinds.index(kind)]
        for part, place, share in zip(parts, self._places, self._shares, strict=True):
            ends = low[place].to(part.device), high[place].to(part.device)
            for values in _chunks(part):
                counts[place] += _count(values, *ends, self._bins).to(counts.device) * share

    def _find_ranges(self, parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ends of the bins of each group, the same on all ranks."""
        # Of negated values too, so that one all-reduce of maxima finds the minima.
        ends = torch.full(
            (2, len(self._groups)), -torch.inf, dtype=sum_dtype(device), device=device
        )
        for part, place in zip(parts, self._places, strict=True):
            for values in _chunks(part):
                for row, signed in zip(ends, (-values, values), strict=True):
                    largest = signed.where(values.isfinite(), -torch.inf).max()
                    row[place] = torch.maximum(row[place], largest.to(device))
        if dist.is_initialized():
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        ends = ends.where(ends.isfinite(), 0)  # nothing to count
        is_point = ends[0] == -ends[1]
        return torch.where(is_point, -ends[0] - 0.5, -ends[0]), ends[1] + 0.5 * is_point


def _chunks(part: Tensor) -> Iterator[Tensor]:
    """Yield the values of a tensor in fp64, some at a time."""
    for values in torch.split(part.reshape(-1), CHUNK) if part.numel() else ():
        yield widen(values)


def _count(values: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Return how many values are in each bin, and how many are not finite, [bins + 1] fp64."""
    scaled = (values - low) * (bins / (high - low))
    index = scaled.nan_to_num(0.0, 0.0, 0.0).long().clamp(0, bins - 1)
    index = index.where(values.isfinite(), bins)
    lanes = LANES if values.is_cuda else 1
    index += torch.arange(len(index), device=index.device) % lanes * (bins + 1)
    counts = torch.zeros(lanes * (bins + 1), dtype=sum_dtype(index.device), device=index.device)
    return counts.index_add_(0, index, torch.ones_like(values)).view(lanes, -1).sum(0)
