"""Metrics for MLflow (does not import torch)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import EnvironmentFault
from ..core.extras import install_command
from ..core.run_dir import read_recipe
from ..core.text.display import join_key, redact
from ..core.text.tree import leaves
from .feed import RowSender, SentRows, extract_scalars

if TYPE_CHECKING:
    from .tables import MLflow

BATCH = 100
LONGEST_VALUE = 500


class MLflowTracker:
    """Sends rows to one run of MLflow, the same one after each resume.

    Raises:
        EnvironmentFault: MLflow is not installed, or its store cannot be used.
    """

    def __init__(self, config: MLflow, run_dir: Path) -> None:
        # Before the import: MLflow 3 starts its telemetry when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        uri = uri or (run_dir.resolve().parent / "mlruns").as_uri()
        if uri.startswith("file:") or "://" not in uri:
            # MLflow 3 refuses its file store without this variable.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            import mlflow
        except ImportError as error:
            raise EnvironmentFault(
                f"the tracker mlflow needs a package that is missing: {error}",
                install_command("mlflow"),
            ) from error
        self._entities = mlflow.entities
        recipe = read_recipe(run_dir)
        steps = recipe.get("run", {}).get("steps")
        self._last_step = steps if isinstance(steps, int) else 0
        target = f"{redact(config.tracking_uri)} {config.experiment}"
        record = SentRows(run_dir / "trackers" / "mlflow.json", target)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._open(config, record, run_dir, recipe)
        except Exception as error:  # stores raise errors of many libraries
            raise EnvironmentFault(
                f"MLflow at {redact(uri)} cannot be used: {redact(str(error))}",
                "check metrics.trackers' tracking_uri; SQL stores need the package `mlflow`",
            ) from error
        self._record = record
        self._feed = RowSender(record, run_dir / "metrics.jsonl", self._send)

    def log(self, row: Mapping[str, Any]) -> None:
        """Queue the numbers of a row."""
        self._feed.log(row)

    def close(self) -> None:
        """Send the queued rows, and set the status of the run."""
        try:
            self._feed.close()
        finally:
            status = "FINISHED" if self._record.step >= self._last_step else "KILLED"
            self._client.set_terminated(self._record.run_id, status)

    def _open(
        self, config: MLflow, record: SentRows, run_dir: Path, recipe: Mapping[str, Any]
    ) -> None:
        """Resume the run of the record, or create one."""
        if record.run_id and self._reopen(record.run_id):
            return
        experiment = self._client.get_experiment_by_name(config.experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(config.experiment)
        )
        pairs = (tag.partition("=") for tag in config.tags)
        run = self._client.create_run(
            experiment_id,
            run_name=config.run_name or run_dir.resolve().name,
            tags={key: value or "true" for key, _, value in pairs},
        )
        record.begin(run.info.run_id)
        parameters = [
            # MLflow allows no quotes in names.
            self._entities.Param(join_key(path).replace('"', ""), str(value)[:LONGEST_VALUE])
            for path, value in leaves(redact(recipe))
            if path
        ]
        for start in range(0, len(parameters), BATCH):
            self._client.log_batch(record.run_id, params=parameters[start : start + BATCH])

    def _reopen(self, run_id: str) -> bool:
        """Mark a run as running, and return whether it still exists."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            # A run that the store no longer has is replaced; any other error is one of the service.
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _send(self, row: Mapping[str, Any]) -> None:
        milliseconds = int(1000 * row.get("time", 0))
        self._client.log_batch(
            self._record.run_id,
            metrics=[
                self._entities.Metric(name, value, milliseconds, row["step"])
                for name, value in extract_scalars(row).items()
            ],
        )
