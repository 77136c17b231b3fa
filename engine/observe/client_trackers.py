"""A tracker for each client of a federation, beside those of the server. Torch-free."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .tables import Tracker, TrackerConfig


class ClientTrackers:
    """Sends rows of kind "client" to trackers that each client has for itself.

    Args:
        configs: the trackers of the recipe.
        run: the run directory; the client NAME of the run RUN has `clients/RUN-NAME` in it.
        resume_step: see `TrackerConfig.build`.
    """

    def __init__(self, configs: Sequence[TrackerConfig], run: Path, resume_step: int) -> None:
        self._configs = configs
        self._run = run
        self._resume_step = resume_step
        self._trackers: dict[str, list[Tracker]] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row of a client to its trackers, which are opened with its first row."""
        name = str(row["client"])
        if name not in self._trackers:
            self._trackers[name] = self._open(name)
        for tracker in self._trackers[name]:
            tracker.log(row)

    def close(self) -> None:
        """Send the rows that are buffered."""
        for trackers in self._trackers.values():
            for tracker in trackers:
                tracker.close()

    def _open(self, name: str) -> list[Tracker]:
        folder = self._run / "clients" / f"{self._run.name}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        recipe = self._run / "recipe.toml"
        if recipe.is_file():
            shutil.copyfile(recipe, folder / recipe.name)
        return [config.build(folder, self._resume_step) for config in self._configs]
