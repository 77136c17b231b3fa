"""Trackers: where metrics go besides metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from ..config import Component
from ..registry import Registry


class Tracker(Protocol):
    """A sink of metric rows, used on one process only."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Take one row of metrics.jsonl (`kind`, `step` and numbers)."""

    def close(self) -> None:
        """Flush what is buffered."""


class TrackerConfig(Component):
    """Base of every tracker's table."""

    def build(self, run_dir: Path, resume_step: int) -> Tracker:
        """Return the tracker; rows after `resume_step` that an earlier attempt wrote are void."""
        raise NotImplementedError


trackers: Registry[TrackerConfig] = Registry("tracker", default="tensorboard")


@trackers.register
class TensorBoard(TrackerConfig):
    """Scalars for TensorBoard in the run directory's `tensorboard/` (extra `[tensorboard]`)."""

    name: Literal["tensorboard"] = "tensorboard"

    def build(self, run_dir: Path, resume_step: int) -> Tracker:
        """Return a writer of event files."""
        from .tensorboard import TensorBoardTracker

        return TensorBoardTracker(run_dir / "tensorboard", resume_step)
