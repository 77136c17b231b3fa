"""Metrics for Weights & Biases (does not import torch)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import EnvironmentFault
from ..core.extras import install_command
from ..core.run_dir import read_recipe
from ..core.text.display import redact
from .feed import RowSender, SentRows, extract_histograms, extract_scalars

if TYPE_CHECKING:
    from .tables import WandB


class WandBTracker:
    """Sends rows to one run of W&B, the same one after each resume.

    The server gets the numbers and the recipe without secrets, but nothing of the command line, the
    code, the console or the environment.

    Raises:
        EnvironmentFault: W&B is not installed, no user is logged in, or it cannot be reached.
    """

    def __init__(self, config: WandB, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise EnvironmentFault(
                f"the tracker wandb needs a package that is missing: {error}",
                install_command("wandb"),
            ) from error
        self._histogram: Any = wandb.Histogram  # its annotation asks for arrays, it takes lists
        record = SentRows(
            run_dir / "trackers" / "wandb.json", f"{config.entity}/{config.project} {config.mode}"
        )
        if not record.run_id:
            # Stored before the service knows the run: a kill in between cannot leave two runs.
            record.begin(uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity or None,
                id=record.run_id,
                # Resumes a run with this id if the service has one, and creates it otherwise.
                resume="allow",
                mode=None if config.mode == "auto" else config.mode,
                name=config.run_name or run_dir.resolve().name,
                group=config.group or None,
                tags=config.tags,
                dir=str(run_dir),
                config=redact(read_recipe(run_dir)),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_meta=True,
                    x_save_requirements=False,
                ),
            )
        except (wandb.Error, OSError) as error:
            raise EnvironmentFault(
                f"W&B cannot be used: {error}",
                '`wandb login`, or mode = "offline" and `wandb sync` later',
            ) from error
        self._feed = RowSender(record, run_dir / "metrics.jsonl", self._send)

    def log(self, row: Mapping[str, Any]) -> None:
        """Queue the numbers of a row."""
        self._feed.log(row)

    def close(self) -> None:
        """Send the queued rows, and close the run."""
        try:
            self._feed.close()
        finally:
            self._run.finish()

    def _send(self, row: Mapping[str, Any]) -> None:
        histograms: dict[str, Any] = {
            name: self._histogram(np_histogram=pair)
            for name, pair in extract_histograms(row).items()
        }
        self._run.log({**extract_scalars(row), **histograms}, step=row["step"])
