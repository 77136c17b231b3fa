"""events.jsonl: the steps of a run that are worth a look, one JSON object a line. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.files import open_regular
from .metrics import MetricsLog, decode_rows

FILE = "events.jsonl"
LARGEST = 2**26
"""bytes that are read of the file"""


class EventLog:
    """Appends events. What a resumed run does again it also records again: no event is there twice.

    Args:
        folder: the run directory.
        resume_step: the step the run resumes after; events of later steps are dropped.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._log = MetricsLog(folder / FILE, resume_step)

    def write(self, event: dict[str, Any]) -> None:
        """Write an event so that it survives a power cut; it has `kind`, `step` and `batch`.

        Raises:
            OSError: the disk is full.
        """
        step, batch = event["step"], event["batch"]
        name = f"{event['kind']}-{step}" + (f"-batch-{batch}" if batch != step else "")
        self._log.write({"id": name, **event, "time": round(time.time(), 3)})
        self._log.sync()

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run directory, oldest first; a line that is no event is left out."""
    with suppress(OSError), open_regular(folder / FILE) as file:
        for row in decode_rows(file.read(LARGEST).decode("utf-8", errors="replace")):
            if isinstance(row.get("id"), str) and isinstance(row.get("kind"), str):
                yield row
