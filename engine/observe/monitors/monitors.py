"""Runs the monitors of a recipe around the optimizer steps at which they are due."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels.summation import sum_dtype
from ..numbers import Number
from ..tables import Monitor, MonitorConfig
from .monitored_model import MonitoredModel


class Monitors:
    """The monitors of a run; a step at which none is due costs nothing.

    All ranks call each method at the same steps. `metrics` sums over ranks, once for all monitors.

    Args:
        configs: the recipe's `[[metrics.monitors]]`.
        model: what is measured; None only without monitors.
    """

    def __init__(
        self, configs: Sequence[MonitorConfig] = (), model: MonitoredModel | None = None
    ) -> None:
        self._all: list[tuple[int, Monitor]] = []
        if model is not None:
            self._all = [(config.interval, config.build(model)) for config in configs]
            self._device = model.device
        self._due: list[Monitor] = []
        self._sums: Sequence[Tensor] | None = None

    def begin(self, step: int) -> None:
        """Begin optimizer step `step`, counted from 1."""
        self._due = [monitor for interval, monitor in self._all if step % interval == 0]
        self._sums = None
        for monitor in self._due:
            monitor.before_forward()

    def after_backward(self) -> None:
        """Tell monitors that the backward passes of the step are done."""
        for monitor in self._due:
            monitor.after_backward()

    @torch.no_grad()
    def before_update(self, clip_factor: Tensor | None) -> None:
        """Measure before an update, which is not skipped.

        Args:
            clip_factor: what gradients were multiplied by to clip them; None: not clipped.
        """
        if not self._due:
            return
        sizes = [monitor.num_sums for monitor in self._due]
        # Views of one tensor, so that all monitors share an all-reduce.
        sums = torch.zeros(sum(sizes), dtype=sum_dtype(self._device), device=self._device)
        self._buffer, self._sums = sums, torch.split(sums, sizes)
        for monitor, own in zip(self._due, self._sums, strict=True):
            monitor.before_update(own, clip_factor)

    @torch.no_grad()
    def after_update(self) -> None:
        """Measure after an update."""
        for monitor, own in zip(self._due, self._sums or (), strict=True):
            monitor.after_update(own)

    @torch.no_grad()
    def metrics(self) -> dict[str, Number]:
        """Sum over all ranks, and return the numbers of the step; none if it was skipped."""
        if not self._due or self._sums is None:
            return {}
        if dist.is_initialized():
            dist.all_reduce(self._buffer)
        due = zip(self._due, self._sums, strict=True)
        numbers = {
            key: value for monitor, own in due for key, value in monitor.metrics(own).items()
        }
        self._due, self._sums = [], None
        return numbers
