"""Writes a run's events down, with the samples of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.samples import TrainingSamples
from ..observe.metrics import EventLog

if TYPE_CHECKING:
    from .health import Event


@dataclass
class EventRecorder:
    """Appends to events.jsonl on rank 0; does nothing on others.

    Args:
        folder: the run directory; None on all ranks but one.
        samples: the training samples.
        global_batch: how many of them a step has.
        attempt: which attempt at the run this is.
        report: tells the user that an event could not be written.
    """

    folder: Path | None
    samples: TrainingSamples
    global_batch: int
    attempt: int
    report: Callable[[str], None]
    _log: EventLog | None = field(default=None, init=False)

    @contextmanager
    def opened(self, resume_step: int) -> Iterator[None]:
        """Hold the file open, without the events of steps that are run again."""
        if self.folder is None:
            yield
            return
        with closing(EventLog(self.folder, resume_step)) as self._log:
            yield

    def record(self, event: Event) -> None:
        """Write an event; a full disk must not end a run for it."""
        if self._log is None:
            return
        row: dict[str, Any] = {
            "kind": event.kind,
            "step": event.step,
            "batch": event.batch,
            "attempt": self.attempt,
            "action": event.action,
            "loss": event.loss,
            "grad_norm": event.grad_norm,
            "lr": event.lr,
        }
        if event.spike:
            row["signals"] = list(event.spike.signals)
            row |= {f"loss_{key}": value for key, value in event.spike.loss._asdict().items()}
            levels = event.spike.grad_norm._asdict()
            row |= {f"grad_norm_{key}": value for key, value in levels.items()}
        first = (event.batch - 1) * self.global_batch
        row["samples"] = self.samples.describe(first, self.global_batch)
        try:
            self._log.write(row)
        except OSError as error:
            self.report(f"an event of step {event.step} is lost: {error.strerror}")
