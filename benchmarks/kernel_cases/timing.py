"""Milliseconds of a call on a device, with cold caches and fresh inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

SHORT = 0.05
"""milliseconds; what takes less may wait for its launches"""
FLUSH_BYTES = 256 * 2**20
"""more than any second-level cache holds"""


@dataclass(frozen=True)
class Times:
    median: float
    low: float
    """a fifth of the calls took less"""
    high: float
    """a fifth of the calls took more"""
    replayed: bool = False
    """from a captured graph, so that no launch was waited for"""


@dataclass
class Timer:
    """Times calls on one device.

    Each call gets the next of several inputs, after the cache was overwritten. On a GPU two events
    enclose it, so that launches are not waited for; short calls are captured in graphs, for whose
    parts nobody waits either. In a dry run all calls count as short.
    """

    device: str
    repeats: int

    def __post_init__(self) -> None:
        self.is_dry = self.device == "cpu"
        size = 2**10 if self.is_dry else FLUSH_BYTES
        self.flush = torch.empty(size, dtype=torch.uint8, device=self.device)

    def __call__(self, function: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Times:
        """Return quantiles of the milliseconds of a call."""
        calls = [partial(function, *inputs) for inputs in sets]
        for call in calls:
            call()
        times = self._measure(calls)
        if times.median >= SHORT and not self.is_dry:
            return times
        try:
            graphs = [self._captured(call) for call in calls]
        except RuntimeError:  # it waits for the device, which no graph can
            self.wait()
            return times
        return replace(self._measure(graphs), replayed=True)

    def _measure(self, calls: Sequence[Callable[[], Any]]) -> Times:
        moments = [(self._moment(), self._moment()) for _ in range(self.repeats)]
        for turn, (before, after) in enumerate(moments):
            self.flush.zero_()
            before.record()
            calls[turn % len(calls)]()
            after.record()
        self.wait()
        found = sorted(before.elapsed_time(after) for before, after in moments)
        fifth = len(found) // 5
        return Times(found[len(found) // 2], found[fifth], found[-1 - fifth])

    def _captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return what replays the call."""
        if self.is_dry:
            return call
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def wait(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def _moment(self) -> Any:
        return _Moment() if self.is_dry else torch.cuda.Event(enable_timing=True)


class _Moment:
    """What a CUDA event is, for a CPU."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: _Moment) -> float:
        return (later.seconds - self.seconds) * 1e3
