"""Traces some steps of a run: what torch's profiler sees, and where the steps' time goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..core.files import sync_folder
from .clocks import clock_of
from .profile_summary import Interval, Summary, operators, peaks, write
from .tables import Profile

SNAPSHOT_EVENTS = 200_000


class Setting(NamedTuple):
    """Whose steps are profiled.

    Args:
        folder: where the files go.
        rank: this process's.
        main: whether this rank writes `summary.json`; others write `summary.rank-R.json`.
        device: where the steps compute.
        flops_per_step: of this rank's share of a step.
    """

    folder: Path
    rank: int
    main: bool
    device: torch.device
    flops_per_step: float


class Profiler:
    """Profiles `table.steps` steps from the `table.start`-th of this attempt on.

    A step lasts from the end of the one before to its own end, so an evaluation or a checkpoint
    counts to the step after it.
    """

    def __init__(self, table: Profile, setting: Setting) -> None:
        self._table = table
        self._setting = setting
        self._clock = clock_of(setting.device)
        self._steps = 0
        self._first_step = 0
        self._trace: Any = None
        self._bounds: list[Any] = []
        self._intervals: list[Interval] = []
        self.summary: Summary | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context around a part of a step."""
        return nullcontext() if self._trace is None else self._marked(name)

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        with record_function(name):
            yield
        self._intervals.append(Interval(name, start, self._clock.mark()))

    def begin(self, step: int) -> None:
        """Take note that `step` steps are done and the next one begins."""
        self._first_step = self._first_step or step + self._table.start
        self._start_if_due()

    def end_step(self) -> None:
        """Take note of the end of a step; the last one's writes the files."""
        self._steps += 1
        if self._trace is None:
            self._start_if_due()
            return
        self._bounds.append(self._clock.mark())
        if len(self._bounds) > self._table.steps:
            self.finish()

    def _start_if_due(self) -> None:
        if self._trace or self.summary or self._steps + 1 != self._table.start:
            return
        self._setting.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
        on_gpu = self._setting.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        if on_gpu and self._table.memory:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        trace = profile(activities=activities, with_flops=True, profile_memory=self._table.memory)
        trace.start()
        self._trace = trace
        self._bounds.append(self._clock.mark())

    def finish(self) -> None:
        """Write what was profiled so far, if anything was."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()
        steps = len(self._bounds) - 1
        if steps < 1:
            return
        bounds, clock, device = self._bounds, self._clock, self._setting.device
        # What began in the last step and was cut short by an error does not count.
        seconds: dict[str, float] = {}
        for name, start, end in self._intervals:
            if clock.seconds(end, bounds[-1]) >= 0:
                seconds[name] = seconds.get(name, 0.0) + clock.seconds(start, end) / steps
        self.summary = Summary(
            rank=self._setting.rank,
            device=device.type,
            first_step=self._first_step,
            steps=steps,
            step_seconds=clock.seconds(bounds[0], bounds[-1]) / steps,
            phase_seconds=seconds,
            peak_bytes=peaks(trace, device.type, set(seconds)) if self._table.memory else {},
            operators=operators(trace, device.type, steps),
            flops_per_step=self._setting.flops_per_step,
            files=self._write_traces(trace),
        )
        name = "summary.json" if self._setting.main else f"summary.rank-{self._setting.rank}.json"
        write(self.summary, self._setting.folder / name)

    def _write_traces(self, trace: Any) -> list[str]:
        """Write the trace, and on a GPU the snapshot of its memory; return the files' names."""
        folder = self._setting.folder
        stem = f"step-{self._first_step}.rank-{self._setting.rank}"
        written = [f"{stem}.trace.json.gz"]
        trace.export_chrome_trace(str(folder / f".tmp-{written[0]}"))
        if self._setting.device.type == "cuda" and self._table.memory:
            written.append(f"{stem}.memory.pickle")
            snapshot = str(folder / f".tmp-{written[1]}")
            torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        for name in written:
            (folder / f".tmp-{name}").replace(folder / name)
        sync_folder(folder)
        return written
