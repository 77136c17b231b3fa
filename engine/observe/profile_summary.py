"""Where the time of a step goes, from what a profiler saw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.files import atomic_write

MAX_OPERATORS = 15
UNMARKED = "other"


class Interval(NamedTuple):
    """A part of a step, between two marks of a clock."""

    name: str
    start: Any
    end: Any


@dataclass(frozen=True)
class Operator:
    """What one operator costs a step."""

    name: str
    calls: float
    seconds: float
    """without the operators that it calls; on a GPU, of its kernels"""
    flops_per_second: float | None
    """where torch's profiler knows how many there are"""
    allocated_bytes: int
    """what it allocated less what it freed; 0 where memory was not recorded"""


@dataclass(frozen=True)
class Summary:
    """What was profiled; times are means over the steps."""

    rank: int
    device: str
    first_step: int
    steps: int
    step_seconds: float
    phase_seconds: dict[str, float]
    peak_bytes: dict[str, int]
    """by phase, over what was in use when profiling began; empty where it was not recorded"""
    operators: list[Operator]
    flops_per_step: float
    files: list[str]

    def phases(self) -> dict[str, float]:
        """Return seconds by phase, the longest first, and last what no phase covers."""
        ordered = sorted(self.phase_seconds.items(), key=lambda pair: -pair[1])
        return dict(ordered) | {UNMARKED: self.step_seconds - sum(self.phase_seconds.values())}

    def lines(self) -> Iterator[str]:
        """Yield the summary as a table."""
        last = self.first_step + self.steps - 1
        training = self.step_seconds - self.phase_seconds.get("evaluation", 0.0)
        rate = self.flops_per_step / training
        yield (
            f"profile of steps {self.first_step} to {last}, rank {self.rank}: "
            f"{_duration(self.step_seconds)} a step, {_flops(rate)} in training"
        )
        memory = "  peak memory" if self.peak_bytes else ""
        yield f"  {'phase':<32}{'a step':>10}{'share':>8}{memory}"
        for name, seconds in self.phases().items():
            peak = f"{self.peak_bytes[name] / 2**20:9,.1f} MiB" if name in self.peak_bytes else ""
            yield f"  {name:<32}{self._time(seconds)}{peak}"
        yield f"  {'operator':<32}{'a step':>10}{'share':>8}{'calls':>8}"
        for each in self.operators:
            rate_text = _flops(each.flops_per_second) if each.flops_per_second else ""
            yield (
                f"  {each.name[:31]:<32}{self._time(each.seconds)}{each.calls:8,.0f}  {rate_text}"
            ).rstrip()

    def _time(self, seconds: float) -> str:
        return f"{_duration(seconds):>10}{seconds / self.step_seconds:8.1%}"


def write(summary: Summary, path: Path) -> None:
    """Write the summary as JSON."""
    content = asdict(summary) | {"phase_seconds": summary.phases()}
    atomic_write(path, json.dumps(content, indent=1) + "\n")


def operators(trace: Any, device_type: str, steps: int) -> list[Operator]:
    """Return the operators that take the most time, the longest first.

    Args:
        trace: a `torch.profiler.profile` that has ended.
        device_type: whose time counts.
        steps: how many it saw.
    """
    on_gpu = device_type == "cuda"
    found = []
    for event in trace.key_averages():
        # Kernels are listed once more by their own names; their time is the operator's.
        if event.is_user_annotation or event.device_type.name != "CPU":
            continue
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        whole = event.device_time_total if on_gpu else event.cpu_time_total
        memory = event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage
        rate = event.flops / (whole * 1e-6) if event.flops and whole else None
        found.append(Operator(event.key, event.count / steps, own * 1e-6 / steps, rate, memory))
    found.sort(key=lambda operator: -operator.seconds)
    return [operator for operator in found[:MAX_OPERATORS] if operator.seconds > 0]


def peaks(trace: Any, device_type: str, phases: set[str]) -> dict[str, int]:
    """Return the most memory in use during each phase, over what was when profiling began.

    Args:
        trace: a `torch.profiler.profile` that recorded memory and has ended.
        device_type: whose memory counts.
        phases: names of the phases.
    """
    events = trace.profiler.kineto_results.events()
    wanted = device_type.upper()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type().name == wanted
    )
    ranges = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name() in phases and event.device_type().name == "CPU"
    )
    found: dict[str, int] = {}
    in_use = position = 0
    for start, end, name in ranges:  # phases do not overlap
        while position < len(changes) and changes[position][0] < start:
            in_use += changes[position][1]
            position += 1
        found[name] = max(found.get(name, 0), in_use)
        while position < len(changes) and changes[position][0] <= end:
            in_use += changes[position][1]
            found[name] = max(found[name], in_use)
            position += 1
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.2f} GFLOP/s"
