"""The events of a run: steps that are worth a look, written to events.jsonl with their samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..observe.metrics import EVENTS_FILE, MetricsLog
from .spikes import Spike

if TYPE_CHECKING:
    from ..data.loader import TurnLoader


@dataclass(frozen=True)
class Event:
    """A step that is worth a look.

    Attributes:
        kind: why it is.
        step: number of the step, counted from 1.
        batch: number of the global batch, counted from 1; above `step` after a rollback.
        loss: task loss of the step.
        grad_norm: gradient norm before clipping.
        lr: learning rate of the step.
        action: the policy that was applied.
        spike: the usual values that the step was compared with, for a spike.
    """

    kind: Literal["non_finite", "spike", "drift"]
    step: int
    batch: int
    loss: float
    grad_norm: float
    lr: float
    action: str
    spike: Spike | None = None


@dataclass
class EventRecorder:
    """Appends events to events.jsonl on rank 0; does nothing on others.

    A resumed run records again the events of the steps that it repeats, so that no event is lost
    and none is there twice.

    Args:
        folder: the run directory; None on all ranks but one.
        loader: knows the samples of each global batch.
        attempt: number of this attempt at the run.
        report: tells the user that an event could not be written.
    """

    folder: Path | None
    loader: TurnLoader
    attempt: int
    report: Callable[[str], None]
    _log: MetricsLog | None = field(default=None, init=False)

    @contextmanager
    def open_log(self, resume_step: int) -> Iterator[None]:
        """Hold the file open; events of steps after `resume_step` are dropped from it."""
        if self.folder is None:
            yield
            return
        with closing(MetricsLog(self.folder / EVENTS_FILE, resume_step)) as self._log:
            yield

    def record(self, event: Event) -> None:
        """Write an event so that it survives a power cut; a full disk must not end the run."""
        if self._log is None:
            return
        batch = f"-batch-{event.batch}" if event.batch != event.step else ""
        row: dict[str, Any] = {
            "id": f"{event.kind}-{event.step}{batch}",
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
            for name, level in (("loss", event.spike.loss), ("grad_norm", event.spike.grad_norm)):
                row |= {f"{name}_{key}": value for key, value in level._asdict().items()}
        # The samples lead to the text that may have caused the event.
        row["samples"] = self.loader.describe_samples(event.batch - 1)
        row["time"] = round(time.time(), 3)
        try:
            self._log.write(row)
            self._log.sync()
        except OSError as error:
            self.report(f"the event of step {event.step} is lost: {error.strerror}")
