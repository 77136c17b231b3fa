"""Which rank makes the others wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..core.heartbeat import heartbeat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOCAL_PHASES = ("data", "optimizer")
SLOW_RATIO = 1.5
SLOW_SHARE = 0.05
ROWS_IN_A_ROW = 3


class SlowRanks:
    """Compares the time of a step that each rank spends by itself, outside collectives.

    The step time itself says nothing: each rank waits for the slowest, so all have the same. What
    differs is the time before they wait: for data, in the optimizer, and in the forward pass where
    the plan has no collectives there (copies of the model alone). It is measured on the host. Where
    a GPU is behind, the host's time in the forward pass is that of its kernels once their queue is
    full.

    A rank is slow when that time is over `SLOW_RATIO` of the median rank's, and the difference over
    `SLOW_SHARE` of the step, in `ROWS_IN_A_ROW` rows of metrics.jsonl.

    Args:
        group: a gloo group of all ranks; None: one process, and nothing is measured.
        local_forward: whether the forward pass has no collectives.
        warn: tells the user, on rank 0.
    """

    def __init__(
        self, group: ProcessGroup | None, warn: Callable[[str], None], *, local_forward: bool
    ) -> None:
        self._group = group
        self._phases = (*LOCAL_PHASES, *["forward"] * local_forward)
        self._warn = warn
        self._suspect, self._times = -1, 0
        self._step, self._started = -1, 0.0

    def compare(self, step: int) -> dict[str, float]:
        """Return which rank is the slowest and by how much; all ranks call it together.

        Args:
            step: how many steps are finished.

        Returns:
            on rank 0 `slowest_rank`, and the seconds of a step that it (`rank_seconds_max`) and the
            median rank (`rank_seconds_median`) spend by themselves; empty in one process, on other
            ranks, and at the first call.
        """
        if self._group is None:
            return {}
        steps, seconds = step - self._step, time.monotonic() - self._started
        mine = sum(heartbeat.seconds.get(name, 0.0) for name in self._phases)
        heartbeat.seconds.clear()
        is_first, self._step, self._started = self._step < 0, step, time.monotonic()
        if is_first or steps < 1:
            return {}
        share = torch.tensor([mine / steps], dtype=torch.float64)
        is_main = self._group.rank() == 0
        parts = [torch.empty_like(share) for _ in range(self._group.size())] if is_main else None
        dist.gather(share, parts, group=self._group, group_dst=0)
        return self._judge([float(part) for part in parts], seconds / steps) if parts else {}

    def _judge(self, own: list[float], step_seconds: float) -> dict[str, float]:
        slowest = max(range(len(own)), key=own.__getitem__)
        median = statistics.median_low(own)
        excess = own[slowest] - median
        is_slow = own[slowest] > SLOW_RATIO * median and excess > SLOW_SHARE * step_seconds
        self._times = self._times + 1 if is_slow and slowest == self._suspect else int(is_slow)
        self._suspect = slowest if is_slow else -1
        if self._times == ROWS_IN_A_ROW:
            self._warn(
                f"rank {slowest} makes the others wait: {own[slowest]:.3g} s of a step in "
                f"{', '.join(self._phases)}, where the median rank takes {median:.3g} s"
            )
        return {
            "slowest_rank": slowest,
            "rank_seconds_max": own[slowest],
            "rank_seconds_median": median,
        }
