"""What trackers of a service have in common: each row is sent once, whatever happens. Torch-free.

metrics.jsonl is the truth, and a tracker a copy of it. The run's id there and how far the copy has
got are kept in `trackers/NAME.json` of the run directory. When a run goes on, rows that were never
sent are sent; steps that are repeated are not, because such services cannot take a step back.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.files import read_regular
from .metrics import read

Row = Mapping[str, Any]
CLOSE_SECONDS = 30.0
MAX_WAITING = 10_000


class SentRows:
    """The id of a run in a service, and the newest step that the service has.

    Args:
        path: where it is kept.
        target: which place of the service it is about; another place begins anew.
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
        """Take note of a new run there."""
        self.run_id, self.step, self.kinds = run_id, -1, set()
        self._write()

    def is_new(self, row: Row) -> bool:
        """Return whether the service lacks a row."""
        step = row["step"]
        return bool(step > self.step or (step == self.step and row["kind"] not in self.kinds))

    def add(self, row: Row) -> None:
        """Take note of a row that was sent."""
        if row["step"] > self.step:
            self.step, self.kinds = row["step"], set()
        self.kinds.add(row["kind"])
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(read_regular(self._path))
            return content if isinstance(content.get("step"), int) else {}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self) -> None:
        """Replace the file; not synced, because a step that is sent twice does little harm."""
        content = {
            "target": self._target,
            "run_id": self.run_id,
            "step": self.step,
            "kinds": sorted(self.kinds),
        }
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content) + "\n", "utf-8")
        temporary.replace(self._path)


class RowSender:
    """Sends rows in a thread of its own, so that a slow service never holds up a step.

    Args:
        record: what was sent before.
        metrics: metrics.jsonl, whose rows that were never sent are sent first.
        send: hands one row to the service; raises if that fails.
    """

    def __init__(self, record: SentRows, metrics: Path, send: Callable[[Row], None]) -> None:
        self._record = record
        self._send = send
        self._waiting: queue.Queue[Row | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        with suppress(OSError):
            for row in read(metrics)[-MAX_WAITING + 1 :]:
                if isinstance(row.get("kind"), str) and record.is_new(row):
                    self._waiting.put(row)
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Queue a row; raises what an earlier one failed with."""
        if self._error is not None:
            raise self._error
        try:
            self._waiting.put_nowait(dict(row))
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING:,} rows wait to be sent") from None

    def close(self) -> None:
        """Send what is queued, for a while; the next attempt sends what is left."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (row := self._waiting.get()) is not None:
            try:
                if self._record.is_new(row):
                    self._send(row)
                    self._record.add(row)
            except Exception as error:
                self._error = error
                return


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row as `kind/name`."""
    return {
        f"{row['kind']}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("step", "time")
    }
