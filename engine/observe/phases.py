"""Phases of a step: reported to the heartbeat, and timed while a profile is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from ..core.heartbeat import heartbeat

Phase = Callable[[str], AbstractContextManager[None]]
"""name -> a context around that part of the step"""

_NOTHING = nullcontext()


def no_phase(_name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return _NOTHING


class StepTimes(NamedTuple):
    """Means over the steps that were timed, in seconds."""

    steps: int
    step_seconds: float
    phase_seconds: dict[str, float]


class PhaseTimer:
    """Reports the phases of a step to the heartbeat, and times them between `start` and `stop`.

    The marks of a GPU are events in its queue of work, so that nothing waits for it. torch's
    profiler cannot give these times: autograd runs the backward pass in a thread of its own, whose
    kernels belong to no annotation of the main thread.

    Args:
        device: the device whose time counts; for a CPU the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._intervals: list[tuple[str, Any, Any]] = []
        self._step_ends: list[Any] = []

    @property
    def is_timing(self) -> bool:
        """Whether `start` was called, and `stop` was not yet."""
        return bool(self._step_ends)

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context around a phase."""
        return self._time(name) if self.is_timing else heartbeat.phase(name)

    @contextmanager
    def _time(self, name: str) -> Iterator[None]:
        with heartbeat.phase(name):
            start = self._mark()
            with record_function(name):
                yield
            self._intervals.append((name, start, self._mark()))

    def start(self) -> None:
        """Begin to time, at the beginning of a step."""
        self._intervals, self._step_ends = [], [self._mark()]

    def end_step(self) -> None:
        """Mark the end of a step, which is the beginning of the next; nothing if not timing."""
        if self.is_timing:
            self._step_ends.append(self._mark())

    def stop(self) -> StepTimes | None:
        """End timing, and return the means; None: no step was timed as a whole."""
        intervals, ends = self._intervals, self._step_ends
        self._intervals, self._step_ends = [], []
        steps = len(ends) - 1
        if steps < 1:
            return None
        phase_seconds: dict[str, float] = {}
        for name, start, end in intervals:
            # What began after the last whole step, and was cut short by an error, does not count.
            if self._seconds(end, ends[-1]) >= 0:
                seconds = self._seconds(start, end) / steps
                phase_seconds[name] = phase_seconds.get(name, 0.0) + seconds
        return StepTimes(steps, self._seconds(ends[0], ends[-1]) / steps, phase_seconds)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - start)
        # Only `stop` asks, after the timed steps: no step waits for events of its own.
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
