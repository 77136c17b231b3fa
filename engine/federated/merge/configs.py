"""The configs of merges. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ...core.config import Count, CountOrZero
from ..tables import MergeConfig, PositiveFloat

if TYPE_CHECKING:
    from .rules import MergeRule


class WeightedMean(MergeConfig):
    """The weighted mean."""

    name: Literal["mean"] = "mean"


class ClippedMean(MergeConfig):
    """The weighted mean of updates whose norms are clipped."""

    name: Literal["clipped_mean"] = "clipped_mean"
    norm: PositiveFloat | None = None
    """the largest L2 norm of an update; default: the median of the round's"""

    def build(self) -> MergeRule:
        """Return the rule."""
        from .rules import ClippedMeanRule

        return ClippedMeanRule(self.norm)


class TrimmedMean(MergeConfig):
    """The mean of each number without the largest and smallest; weights do not count
    (arXiv:1803.01498).
    """

    name: Literal["trimmed_mean"] = "trimmed_mean"
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """share of the updates that is left out at each end"""

    def build(self) -> MergeRule:
        """Return the rule."""
        from .rules import TrimmedMeanRule

        return TrimmedMeanRule(self.trim)


class Median(MergeConfig):
    """The median of each number; weights do not count (arXiv:1803.01498)."""

    name: Literal["median"] = "median"

    def build(self) -> MergeRule:
        """Return the rule."""
        from .rules import TrimmedMeanRule

        return TrimmedMeanRule(0.5)


class Krum(MergeConfig):
    """The updates that are nearest to most others; weights do not count (Blanchard et al. 2017)."""

    name: Literal["krum"] = "krum"
    faulty: CountOrZero | None = None
    """updates that may be faulty; default: the most that the rule allows, (n - 3) / 2"""
    keep: Count = 1
    """updates that are averaged"""

    def build(self) -> MergeRule:
        """Return the rule."""
        from .rules import KrumRule

        return KrumRule(self.faulty, self.keep)
