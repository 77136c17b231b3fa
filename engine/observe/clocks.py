"""Time on the host, or in a GPU's queue of work without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time, and later says how far they are apart."""

    def mark(self) -> Any:
        """Return now."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks."""


class HostClock:
    """The host's clock."""

    def mark(self) -> float:
        """Return now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start


class DeviceClock:
    """When a GPU gets to a mark in its queue; nothing waits until the marks are compared."""

    def mark(self) -> torch.cuda.Event:
        """Put a mark at the end of the current queue."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two marks, once the device has passed both."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which a device's phases are measured."""
    return DeviceClock() if device.type == "cuda" else HostClock()
