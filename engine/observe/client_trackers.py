"""A tracker for each client of a federation, beside those of the server. Torch-free."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from .metrics import read
from .tables import Tracker, TrackerConfig


class ClientTrackers:
    """Sends rows of kind "client" to trackers that each client has for itself.

    Args:
        configs: the trackers of the recipe.
        run: the run directory; the client NAME of the run RUN has `clients/RUN-NAME` in it.
    """

    def __init__(self, configs: Sequence[TrackerConfig], run: Path) -> None:
        self._configs = configs
        self._run = run
        self._trackers: dict[str, list[Tracker]] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row of a client to its trackers, which are opened with its first row.

        They get the rows of earlier attempts first: a kill may have come before those were sent.
        """
        name, rows = str(row["client"]), [row]
        if name not in self._trackers:
            self._trackers[name] = self._open(name)
            rows = [each for each in self._earlier[name] if each["step"] < row["step"]] + rows
        for tracker in self._trackers[name]:
            for each in rows:
                tracker.log(each)

    def close(self) -> None:
        """Send the rows that are buffered."""
        for trackers in self._trackers.values():
            for tracker in trackers:
                tracker.close()

    @cached_property
    def _earlier(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of clients in metrics.jsonl."""
        found = defaultdict[str, list[dict[str, Any]]](list)
        with suppress(OSError):
            for row in read(self._run / "metrics.jsonl"):
                if row.get("kind") == "client":
                    found[str(row.get("client"))].append(row)
        return found

    def _open(self, name: str) -> list[Tracker]:
        folder = self._run / "clients" / f"{self._run.name}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        recipe = self._run / "recipe.toml"
        if recipe.is_file():
            shutil.copyfile(recipe, folder / recipe.name)
        # As if the run began: what a tracker wrote before is void, or is not sent twice.
        return [config.build(folder, 0) for config in self._configs]
