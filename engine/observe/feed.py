"""Sends each row of metrics.jsonl to a tracking service once. Torch-free.

`trackers/NAME.json` of the run directory holds the run's id in the service and the newest step that
was sent. A run that resumes sends the rows that were never sent, but not those of steps that it
repeats, because such services do not replace a step.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.files import atomic_write, read_regular
from .metrics import VALIDATION, read

Row = Mapping[str, Any]
CLOSE_SECONDS = 30.0
MAX_WAITING = 10_000


class SentRows:
    """The id of a run in a service, and the newest step that the service has.

    Args:
        path: the JSON file that holds them.
        target: the project in the service; for another one the file's content is ignored.

    Attributes:
        run_id: id of the run in the service, empty before there is one.
        step: the newest step of which a row was sent, -1 before there is one.
        kinds: labels of the rows of that step, see `label_row`.
    """

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target
        content = self._read()
        same = content.get("target") == target
        self.run_id = str(content.get("run_id", "")) if same else ""
        self.step = int(content.get("step", -1)) if same else -1
        self.kinds = set(content.get("kinds", ())) if same else set()

    def begin(self, run_id: str) -> None:
        """Store the id of a new run in the service."""
        self.run_id, self.step, self.kinds = run_id, -1, set()
        self._write()

    def is_new(self, row: Row) -> bool:
        """Return whether the service lacks a row."""
        step = row["step"]
        return bool(step > self.step or (step == self.step and label_row(row) not in self.kinds))

    def add(self, row: Row) -> None:
        """Store that a row was sent."""
        if row["step"] > self.step:
            self.step, self.kinds = row["step"], set()
        self.kinds.add(label_row(row))
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(read_regular(self._path))
            return content if isinstance(content.get("step"), int) else {}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self) -> None:
        content = {
            "target": self._target,
            "run_id": self.run_id,
            "step": self.step,
            "kinds": sorted(self.kinds),
        }
        self._path.parent.mkdir(exist_ok=True)
        atomic_write(self._path, json.dumps(content) + "\n")


class RowSender:
    """Sends rows in a thread, so that a slow service never holds up a step.

    Args:
        record: the rows that were sent before.
        metrics: metrics.jsonl; rows in it that were never sent are sent first.
        send: sends one row to the service, and raises if that fails.
    """

    def __init__(self, record: SentRows, metrics: Path, send: Callable[[Row], None]) -> None:
        self._record = record
        self._send = send
        self._waiting: queue.Queue[Row | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        with suppress(OSError):
            # Fewer than the queue holds: the thread that empties it does not run yet, and `put`
            # would wait.
            for row in read(metrics)[-MAX_WAITING + 1 :]:
                # Each client has a tracker of its own, see `ClientTrackers`.
                is_own = isinstance(row.get("kind"), str) and row["kind"] != "client"
                if is_own and record.is_new(row):
                    self._waiting.put(row)
        # A daemon, so that a service that does not answer cannot keep the process alive.
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Queue a row, or raise the error with which the service refused an earlier one."""
        if self._error is not None:
            raise self._error
        try:
            # `ClientTrackers` sends earlier rows again: those must not fill the queue.
            if self._record.is_new(row):
                self._waiting.put_nowait(dict(row))
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING:,} rows wait to be sent") from None

    def close(self) -> None:
        """Send the queued rows for up to half a minute; the next attempt sends the rest."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (row := self._waiting.get()) is not None:
            try:
                # Sent before it is recorded: a kill in between sends the row twice, and loses none.
                if self._record.is_new(row):
                    self._send(row)
                    self._record.add(row)
            except Exception as error:
                self._error = error
                return


def label_row(row: Row) -> str:
    """Return the kind of a row, and the split of one that measures another than validation."""
    split = row.get("split", VALIDATION)
    is_further = row["kind"] == "eval" and split != VALIDATION
    return f"{row['kind']}/{split}" if is_further else str(row["kind"])


def extract_scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row as `label/name`, see `label_row`."""
    return {
        f"{label_row(row)}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("step", "time")
    }


def extract_histograms(row: Row) -> dict[str, tuple[list[int], list[float]]]:
    """Return the histograms of a row as `label/name`: counts, and the edges of the bins."""
    found = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and "counts" in value:
            counts, low = value["counts"], value["low"]
            width = (value["high"] - low) / len(counts)
            edges = [low + number * width for number in range(len(counts) + 1)]
            found[f"{label_row(row)}/{name}"] = counts, edges
    return found
