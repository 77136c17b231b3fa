"""Profiles some steps of a run: what torch's profiler sees, and where the time of a step goes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from ...kernels.torch_private import dump_memory_snapshot, record_memory_history
from ..core.files import atomic_write, sync_folder
from .phases import PhaseTimer

SNAPSHOT_EVENTS = 200_000
MAX_OPERATORS = 15
UNMARKED = "other"


@dataclass(frozen=True)
class Operator:
    """The cost of an operator in a step."""

    name: str
    calls: float
    seconds: float
    """its own time, without the operators that it calls; on a GPU the time of its kernels"""
    flops_per_second: float | None
    """for operators whose FLOPs torch's profiler knows"""
    allocated_bytes: int
    """allocated less freed bytes; 0 if memory was not recorded"""


@dataclass(frozen=True)
class Summary:
    """A profile; times are means over the steps."""

    rank: int
    device: str
    first_step: int
    steps: int
    step_seconds: float
    phase_seconds: dict[str, float]
    peak_bytes: dict[str, int]
    """by phase, over the memory in use when profiling began; empty if it was not recorded"""
    operators: list[Operator]
    flops_per_step: float
    files: list[str]

    def order_phases(self) -> dict[str, float]:
        """Return seconds by phase, the longest first; last the time that no phase covers."""
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
        for name, seconds in self.order_phases().items():
            peak = f"{self.peak_bytes[name] / 2**20:9,.1f} MiB" if name in self.peak_bytes else ""
            yield f"  {name:<32}{self._time(seconds)}{peak}"
        yield f"  {'operator':<32}{'a step':>10}{'share':>8}{'calls':>8}"
        for operator in self.operators:
            rate_text = _flops(operator.flops_per_second) if operator.flops_per_second else ""
            cells = f"{operator.name[:31]:<32}{self._time(operator.seconds)}{operator.calls:8,.0f}"
            yield f"  {cells}  {rate_text}".rstrip()

    def _time(self, seconds: float) -> str:
        return f"{_duration(seconds):>10}{seconds / self.step_seconds:8.1%}"


@dataclass
class Profiler:
    """Profiles `steps` steps of this attempt.

    A step lasts from the end of the one before to its own end, so an evaluation or a checkpoint
    counts to the step after it.

    Args:
        start: the first profiled step, counted from where this attempt starts.
        steps: number of profiled steps.
        memory: whether to record every allocation.
        phases: times the phases of the training step.
        folder: where the files go.
        rank: this process's rank.
        is_main: whether this rank writes `summary.json`; others write `summary.rank-R.json`.
        device: the device on which steps compute.
        flops_per_step: returns this rank's share of the operations of a step.

    Attributes:
        summary: what was profiled; None before it is written.
    """

    start: int
    steps: int
    memory: bool
    phases: PhaseTimer
    folder: Path
    rank: int
    is_main: bool
    device: torch.device
    flops_per_step: Callable[[], float]
    summary: Summary | None = field(default=None, init=False)
    _profile: profile | None = field(default=None, init=False)
    _first_step: int = field(default=0, init=False)

    def begin(self, step: int) -> None:
        """Begin the schedule after `step` steps; a rollback does not begin it again."""
        if self._profile is not None:
            return
        self._first_step = step + self.start
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto prints when it starts and stops
        on_gpu = self.device.type == "cuda"
        warmup = min(1, self.start - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step before the first one could warm up
            steps = schedule(
                skip_first=self.start - 1 - warmup,
                wait=0,
                warmup=warmup,
                active=self.steps,
                # Without it the schedule would start again after the last profiled step.
                repeat=1,
            )
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu,
            schedule=steps,
            on_trace_ready=self._write,
            with_flops=True,
            profile_memory=self.memory,
        )
        self._profile.start()
        self._start_timing_if_due(self._profile)

    def end_step(self) -> None:
        """Tell the schedule that a step has ended; the last profiled one writes the files."""
        if self._profile is not None and self.summary is None:
            self.phases.end_step()
            self._profile.step()
            self._start_timing_if_due(self._profile)

    def finish(self) -> None:
        """Write what was profiled so far, if anything was."""
        if self._profile is not None and self.summary is None:
            self._profile.stop()

    def abandon(self) -> None:
        """Stop torch's profiler and write nothing: a forgotten one would keep each later event."""
        self.phases.stop()
        if self._profile is not None:
            self._profile.on_trace_ready = None
            with suppress(RuntimeError):
                self._profile.stop()
        if self._takes_snapshot:
            record_memory_history(enabled=None)

    def _start_timing_if_due(self, trace: profile) -> None:
        is_recording = trace.current_action in (
            ProfilerAction.RECORD,
            ProfilerAction.RECORD_AND_SAVE,
        )
        if is_recording and not self.phases.is_timing:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._takes_snapshot:
                # Before the clock starts, so that its cost is not in the first step.
                record_memory_history(max_entries=SNAPSHOT_EVENTS)
            self.phases.start()

    @property
    def _takes_snapshot(self) -> bool:
        return self.device.type == "cuda" and self.memory

    def _write(self, trace: profile) -> None:
        times = self.phases.stop()
        if times is None:
            return
        memory_phases = times.phase_seconds if self.memory else ()
        self.summary = Summary(
            rank=self.rank,
            device=self.device.type,
            first_step=self._first_step,
            steps=times.steps,
            step_seconds=times.step_seconds,
            phase_seconds=times.phase_seconds,
            peak_bytes=measure_peaks(trace, self.device.type, memory_phases),
            operators=summarize_operators(trace, self.device.type, times.steps),
            flops_per_step=self.flops_per_step(),
            files=self._write_traces(trace),
        )
        name = "summary.json" if self.is_main else f"summary.rank-{self.rank}.json"
        content = asdict(self.summary) | {"phase_seconds": self.summary.order_phases()}
        atomic_write(self.folder / name, json.dumps(content, indent=1) + "\n")

    def _write_traces(self, trace: profile) -> list[str]:
        """Write the trace, and on a GPU the snapshot of its memory; return the files' names."""
        folder = self.folder
        stem = f"step-{self._first_step}.rank-{self.rank}"
        written = [f"{stem}.trace.json.gz"]
        trace.export_chrome_trace(str(folder / f".tmp-{written[0]}"))
        if self._takes_snapshot:
            written.append(f"{stem}.memory.pickle")
            snapshot = str(folder / f".tmp-{written[1]}")
            dump_memory_snapshot(snapshot)
            record_memory_history(enabled=None)
        for name in written:
            # torch writes to a path, not atomically: a reader must not find half a trace.
            (folder / f".tmp-{name}").replace(folder / name)
        sync_folder(folder)
        return written


def summarize_operators(trace: profile, device_type: str, steps: int) -> list[Operator]:
    """Return the operators that take the most time, the longest first.

    Args:
        trace: a `torch.profiler.profile` that has ended.
        device_type: the device whose time counts.
        steps: number of steps that it has seen.
    """
    on_gpu = device_type == "cuda"
    rows = []
    for event in trace.key_averages():
        # Kernels are listed once more by their own names; their time is the operator's.
        if event.is_user_annotation or event.device_type.name != "CPU":
            continue
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        whole = event.device_time_total if on_gpu else event.cpu_time_total
        memory = event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage
        rate = event.flops / (whole * 1e-6) if event.flops and whole else None
        rows.append(Operator(event.key, event.count / steps, own * 1e-6 / steps, rate, memory))
    rows.sort(key=lambda operator: -operator.seconds)
    return [operator for operator in rows[:MAX_OPERATORS] if operator.seconds > 0]


def measure_peaks(trace: Any, device_type: str, phases: Collection[str]) -> dict[str, int]:
    """Return the peak memory of each phase, over the memory in use when profiling began.

    Args:
        trace: a `torch.profiler.profile` with memory that has ended.
        device_type: the device whose memory counts.
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
    highest: dict[str, int] = {}
    # A free has negative bytes, so the sum counts from the memory in use when profiling began.
    in_use = position = 0
    for start, end, name in ranges:  # phases do not overlap
        while position < len(changes) and changes[position][0] < start:
            in_use += changes[position][1]
            position += 1
        highest[name] = max(highest.get(name, 0), in_use)
        while position < len(changes) and changes[position][0] <= end:
            in_use += changes[position][1]
            highest[name] = max(highest[name], in_use)
            position += 1
    return highest


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.2f} GFLOP/s"
