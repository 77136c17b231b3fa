"""Find steps whose loss or gradient norm is far above the ones before, by median and MAD.

Only high values count. Everything is computed in Python's floats from the numbers of the steps, so
that a resumed run and all ranks decide alike. Torch-free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

NORMAL_MAD = 1.4826
"""the standard deviation of a normal distribution over its median absolute deviation"""
LEAST_LOSS_SPREAD = 0.02
"""share of the median (of 1 if the median is less): a loss that hardly varies has no spikes"""
LEAST_NORM_SPREAD = 0.2
"""of the logarithm of the gradient norm: a threshold of 8 is then at least a factor of 5"""
LOST_SHARE = 0.25
"""a run diverges when it has lost this share of what it had gained, or more"""
WORSE_SHARE = 0.5
"""... or when its loss is above that of the first step by this share"""
RECENT = 16
"""number of last steps whose median is the loss that a run ends with"""


class Level(NamedTuple):
    """The median of a window of values, and the limit above which a value is a spike."""

    median: float
    limit: float


@dataclass(frozen=True)
class Spike:
    """A step above the limits.

    Attributes:
        signals: which of its numbers are: "loss", "grad_norm".
        loss: the level of the losses before it.
        grad_norm: the level of the gradient norms before it.
    """

    signals: tuple[str, ...]
    loss: Level
    grad_norm: Level


@dataclass(frozen=True)
class BestLoss:
    """The lowest median loss so far, with the step at which the window had it."""

    median: float
    limit: float
    step: int


def loss_level(losses: Sequence[float], threshold: float) -> Level:
    """Return the median and median + threshold * max(1.4826 MAD, 0.02 max(|median|, 1))."""
    middle = median(losses)
    spread = NORMAL_MAD * median(abs(loss - middle) for loss in losses)
    return Level(middle, middle + threshold * max(spread, LEAST_LOSS_SPREAD * max(abs(middle), 1)))


def norm_level(norms: Sequence[float], threshold: float) -> Level:
    """Return the level of gradient norms, all above 0, by their logarithms.

    Norms vary by factors. The least spread of the logarithm is 0.2.
    """
    logs = [math.log(norm) for norm in norms]
    middle = median(logs)
    spread = NORMAL_MAD * median(abs(log - middle) for log in logs)
    limit = middle + threshold * max(spread, LEAST_NORM_SPREAD)
    return Level(math.exp(middle), math.exp(min(limit, 700.0)))


class SpikeDetector:
    """Compares each step with a window of the steps before it.

    Args:
        window: number of steps.
        threshold: distance from the median to the limit, in standard deviations, which are
            estimated by the median absolute deviation.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._threshold = threshold
        self._least = min(window, max(8, window // 4))
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._first: float | None = None
        self._best: BestLoss | None = None
        self._is_drifting = False

    def judge(self, loss: float, norm: float) -> Spike | None:
        """Compare a step with the window; None if it is usual, or the window is too short."""
        # With few steps in the window, the spread of usual values is not known yet.
        if norm <= 0 or len(self._steps) < self._least:
            return None
        losses, norms = zip(*self._steps, strict=True)
        loss_limits = loss_level(losses, self._threshold)
        norm_limits = norm_level(norms, self._threshold)
        above = {"loss": loss > loss_limits.limit, "grad_norm": norm > norm_limits.limit}
        signals = tuple(name for name in above if above[name])
        return Spike(signals, loss_limits, norm_limits) if signals else None

    def add(self, step: int, loss: float, norm: float) -> bool:
        """Add a step to the window, and return whether the run begins to diverge with it.

        A step without gradient is left out.
        """
        if norm <= 0:
            return False
        if self._first is None:
            self._first = loss
        self._steps.append((loss, norm))
        if len(self._steps) < self._least:
            return False
        # Medians of windows are compared: a single step may have a low loss by chance.
        level = loss_level([loss for loss, _ in self._steps], self._threshold)
        if self._best is None or level.median < self._best.median:
            self._best = BestLoss(level.median, level.limit, step)
        was, limit = self._is_drifting, self.loss_limit()
        self._is_drifting = level.median > limit
        return self._is_drifting and not was

    def loss_limit(self) -> float:
        """Return the median loss above which a run diverges; infinite before the first step."""
        if self._first is None:
            return math.inf
        worse = self._first + WORSE_SHARE * max(abs(self._first), 1)
        if self._best is None:
            return worse
        # Early in a run the gain is small, and its share within the noise: hence the best limit.
        lost = self._best.median + LOST_SHARE * (self._first - self._best.median)
        return min(worse, max(self._best.limit, lost))

    def losses(self) -> tuple[float, float, int]:
        """Return the loss of the last steps, the best loss, and the step of the best."""
        recent = [loss for loss, _ in self._steps][-RECENT:]
        last = median(recent) if recent else 0.0
        if self._best is None or (self._first is not None and self._first < self._best.median):
            return last, last if self._first is None else self._first, 1
        return last, self._best.median, self._best.step

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to decide alike, as finite JSON."""
        return {
            "steps": [list(step) for step in self._steps],
            "first": self._first,
            "best": self._best and asdict(self._best),
            "is_drifting": self._is_drifting,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, also for a window of another size."""
        self._steps.clear()
        self._steps.extend((loss, norm) for loss, norm in state.get("steps", []))
        self._first = state.get("first")
        self._best = BestLoss(**best) if (best := state.get("best")) else None
        self._is_drifting = state.get("is_drifting", False)
