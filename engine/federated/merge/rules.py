"""How the updates of a round become one pseudo-gradient, where all of them must be there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import floor
from statistics import median

import torch
from torch import Tensor

from .geometry import Geometry

Gradient = Mapping[str, Tensor]


class MergeRule(ABC):
    """Merges pseudo-gradients; each rank merges its shards."""

    @abstractmethod
    def merge(
        self, updates: Sequence[Gradient], weights: Sequence[float], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Return the merged pseudo-gradient.

        Args:
            updates: the pseudo-gradients, in the order of client number; at least one.
            weights: weight of each in a mean.
            geometry: measures them over all ranks.
        """


class ClippedMeanRule(MergeRule):
    """The weighted mean of updates whose norms are clipped.

    Args:
        norm: the largest L2 norm; None: the median of the round's.
    """

    def __init__(self, norm: float | None) -> None:
        self._norm = norm

    def merge(
        self, updates: Sequence[Gradient], weights: Sequence[float], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Return the merged pseudo-gradient."""
        norms = [geometry.norm(update) for update in updates]
        limit = median(norms) if self._norm is None else self._norm
        factors = [min(1.0, limit / norm) if norm > 0 else 1.0 for norm in norms]
        total = sum(weights)
        shares = [w * f / total for w, f in zip(weights, factors, strict=True)]
        return {
            name: sum_scaled([update[name] for update in updates], shares) for name in updates[0]
        }


class TrimmedMeanRule(MergeRule):
    """The mean of each number without the largest and smallest.

    Args:
        trim: share of the updates that is left out at each end; 0.5: all but the middle, which is
            the median.
    """

    def __init__(self, trim: float) -> None:
        self._trim = trim

    def merge(
        self, updates: Sequence[Gradient], weights: Sequence[float], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Return the merged pseudo-gradient."""
        count = len(updates)
        out = min(floor(self._trim * count), (count - 1) // 2)
        # One tensor at a time: all of them sorted would need the memory of another round.
        return {
            name: torch.stack([update[name] for update in updates])
            .sort(0)
            .values[out : count - out]
            .mean(0)
            for name in updates[0]
        }


class KrumRule(MergeRule):
    """The mean of the updates with the smallest sums of squared distances to their neighbours.

    Args:
        faulty: updates that may be faulty; None: as many as the rule allows.
        keep: updates that are averaged.
    """

    def __init__(self, faulty: int | None, keep: int) -> None:
        self._faulty = faulty
        self._keep = keep

    def merge(
        self, updates: Sequence[Gradient], weights: Sequence[float], geometry: Geometry
    ) -> dict[str, Tensor]:
        """Return the merged pseudo-gradient."""
        count = len(updates)
        most = max(0, (count - 3) // 2)
        faulty = most if self._faulty is None else min(self._faulty, most)
        near = max(1, count - faulty - 2)
        distances = geometry.squared_distances(updates)
        scores = [sum(sorted(row[:i] + row[i + 1 :])[:near]) for i, row in enumerate(distances)]
        best = sorted(sorted(range(count), key=lambda i: scores[i])[: self._keep])
        return {
            name: sum_scaled([updates[i][name] for i in best], [1 / len(best)] * len(best))
            for name in updates[0]
        }


def sum_scaled(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of tensors times factors, in their order."""
    total = tensors[0] * factors[0]
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        total.add_(tensor, alpha=factor)
    return total
