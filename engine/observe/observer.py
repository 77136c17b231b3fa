"""Records and shows the metrics of a run; waits for the device only to write a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import EnvironmentFault, TrainerError
from .client_trackers import ClientTrackers
from .metrics import MetricsLog
from .numbers import Number, to_floats, to_histograms
from .phases import Phase, no_phase
from .progress import Progress
from .results import Results
from .tables import Metrics, TensorBoard, Tracker, TrackerConfig
from .throughput import Throughput

if TYPE_CHECKING:
    from ..core.run_dir import RunDirectory
    from .profiler import Profiler

Item = TypeVar("Item")


class Observer:
    """Records and shows steps and evaluations on rank 0; does nothing on others.

    Rows are written at step 1, at each multiple of the interval, where a monitor is due, and at the
    last step, so that resumed and uninterrupted runs have the same rows.

    Args:
        table: the recipe's `[metrics]`.
        directory: the run directory, with metrics.jsonl and the files of trackers.
        rank: number of this rank.
        total_steps: number of optimizer steps of the run.
        progress: the screen.
        throughput: counts time and units of the task.
        memory: returns the peak memory in bytes without waiting for the device.
        phases: times the phases of a step.
        profiler: the profiler of this rank, if its steps are profiled.
        compare_ranks: returns more columns for the row of a step; all ranks call it together.
        on_batches: gets this rank's batches of each step before it begins.
    """

    def __init__(
        self,
        table: Metrics,
        directory: RunDirectory,
        rank: int,
        total_steps: int,
        progress: Progress,
        throughput: Throughput,
        memory: Callable[[], int],
        phases: Phase = no_phase,
        profiler: Profiler | None = None,
        compare_ranks: Callable[[int], Mapping[str, float]] = lambda step: {},
        on_batches: Callable[[Any], None] = lambda batches: None,
    ) -> None:
        self._table = table
        self._directory = directory
        self._records = rank == 0
        self._total_steps = total_steps
        self._progress = progress
        self._warn = progress.warn
        self._throughput = throughput
        self._memory = memory
        self._profiler = profiler
        self._compare_ranks = compare_ranks
        self._on_batches = on_batches
        self._phases = phases
        self._log: MetricsLog | None = None
        self._results: Results | None = None
        self._trackers: list[Tracker] = []
        self._of_clients: list[Tracker] = []

    def start(self, step: int, count: int, *, is_evaluated: bool = True) -> None:
        """Begin at a position of the run; rows of later steps are dropped.

        Args:
            step: finished optimizer steps.
            count: units of the task, such as tokens, trained on.
            is_evaluated: whether the evaluation after `step` was done.

        Raises:
            EnvironmentFault: a tracker cannot be used, and no step is done yet.
        """
        self._start(step, is_evaluated)
        if self._profiler:
            with self._contain_profiler_errors():
                self._profiler.begin(step)
        self._throughput.start(step, count)

    def _start(self, step: int, is_evaluated: bool) -> None:
        if not self._records:
            return
        self._close_trackers()
        if self._log is None:
            self._log = MetricsLog(self._directory.metrics, step)
        self._log.rewind(step, is_evaluated=is_evaluated)
        self._results = Results(self._directory.path, step)
        configs = list(self._table.trackers)
        if self._table.tensorboard and all(c.name != "tensorboard" for c in configs):
            # `metrics.tensorboard` is short for this tracker; a recipe that lists it too gets one.
            configs.append(TensorBoard())
        for config in configs:
            self._open_tracker(config, step)
        if configs:
            self._of_clients = [ClientTrackers(configs, self._directory.path)]
        self._progress.start(step, self._total_steps)

    def _open_tracker(self, config: TrackerConfig, step: int) -> None:
        """Add a tracker; a run that resumes continues without one that cannot be used."""
        try:
            self._trackers.append(config.build(self._directory.path, step))
        except Exception as error:
            if step:
                self._warn(f"the tracker {config.name} is left out of this attempt: {error}")
            elif isinstance(error, TrainerError):
                raise
            else:
                message = f"the tracker {config.name} cannot be used: {type(error).__name__}"
                raise EnvironmentFault(f"{message}: {error}") from error

    def is_due(self, step: int) -> bool:
        """Return whether a row is written at `step`."""
        intervals = [self._table.interval, *(each.interval for each in self._table.monitors)]
        return step in (1, self._total_steps) or any(step % interval == 0 for interval in intervals)

    def on_step(self, step: int, values: Mapping[str, Number], count: Number, batches: int) -> None:
        """Observe a finished optimizer step.

        Args:
            step: number of the step, counted from 1.
            values: metrics of the step, the same on all ranks; only needed if `is_due`.
            count: units of the task trained on so far, over all ranks and attempts.
            batches: global batches that were read so far.
        """
        with self._phases("logging"):
            self._observe(step, values, count, batches)
        if self._profiler:
            # The last profiled step writes the trace, which takes seconds and is no part of a step.
            with self._throughput.exclude_time(), self._contain_profiler_errors():
                self._profiler.end_step()

    def _observe(
        self, step: int, values: Mapping[str, Number], count: Number, batches: int
    ) -> None:
        if not self.is_due(step):
            self._progress.advance(step)
            return
        # All ranks get here, although only rank 0 writes: the comparison is a collective.
        ranks = self._compare_ranks(step)
        if self._log is None:
            return
        numbers = to_floats({**values, "count": count})  # waits for the device, then:
        total = int(numbers.pop("count"))
        counted = self._throughput.name_counts(total, batches)
        rates = self._throughput.read(step, total, batches)
        row = {"kind": "train", "step": step, **numbers, **counted, **rates, **ranks}
        self._record({**row, "memory_bytes": self._memory(), **to_histograms(values)})

    def on_evaluation(self, step: int, values: Mapping[str, Number], split: str) -> None:
        """Record the numbers of a split after `step` steps; those of tasks have no `loss`."""
        if self._log is not None:
            self._record({"kind": "eval", "step": step, "split": split, **to_floats(values)})

    def on_row(self, row: Mapping[str, Any]) -> None:
        """Record a row of another kind, with its `kind` and `step`."""
        if self._log is not None:
            self._record(dict(row))

    def on_best(
        self, step: int, values: Mapping[str, Number], best: Mapping[str, str | float | None]
    ) -> None:
        """Write results.json after an evaluation.

        Args:
            step: number of finished steps.
            values: the numbers of the evaluation.
            best: `metric`, `direction`, `score` and `step` of the best evaluation so far.
        """
        if self._results is not None:
            self._results.record(step, to_floats(values), best)

    def exclude_time(self) -> AbstractContextManager[None]:
        """Leave the time of the context out of step times and rates."""
        return self._throughput.exclude_time()

    def measure_waits(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items (the data), and measure how long each was waited for."""
        items = self._throughput.measure_waits(items)
        while True:
            with self._phases("data"):
                item = next(items, None)
            if item is None:
                return
            self._on_batches(item)
            yield item

    def sync(self) -> None:
        """Make the rows so far survive a power cut, before a checkpoint is saved."""
        if self._log is not None:
            with suppress(OSError):
                self._log.sync()

    def close(self) -> None:
        """Close the files and the progress bar, and show the profile."""
        if self._profiler:
            self._show_profile(self._profiler)
        self._close_trackers()
        if self._log is not None:
            self._log.close()
        self._progress.close()

    def _show_profile(self, profiler: Profiler) -> None:
        with self._contain_profiler_errors():
            profiler.finish()
            if profiler.summary is None:
                self._warn("nothing was profiled: the run ended before step profile.start did")
                return
            for line in profiler.summary.lines():
                self._progress.note(line)

    @contextmanager
    def _contain_profiler_errors(self) -> Iterator[None]:
        """Report an error of the profiler, and continue without it."""
        try:
            yield
        except Exception as error:
            self._warn(f"the profile is lost: {type(error).__name__}: {error}")
            if self._profiler:
                self._profiler.abandon()
            self._profiler = None

    def _record(self, row: dict[str, Any]) -> None:
        assert self._log is not None
        # One time for the file and all trackers.
        row["time"] = round(time.time(), 3)
        try:
            self._log.write(row)
        except OSError as error:
            self._warn(f"a row of {self._log.path} is lost: {error.strerror}")
        self._progress.show(row)
        # Rows of clients have one step each round, and would overwrite one another in one place.
        trackers = self._of_clients if row["kind"] == "client" else self._trackers
        for tracker in list(trackers):
            try:
                tracker.log(row)
            except Exception as error:
                trackers.remove(tracker)
                self._warn(f"{type(tracker).__name__} failed and is left out from now on: {error}")

    def _close_trackers(self) -> None:
        for tracker in [*self._trackers, *self._of_clients]:
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"{type(tracker).__name__} could not be closed: {error}")
        self._trackers, self._of_clients = [], []
