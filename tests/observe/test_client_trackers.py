"""Trackers of clients after a kill: they get what was never sent, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.observe.test_tensorboard import scalars
from trainer.engine.observe.client_trackers import ClientTrackers
from trainer.engine.observe.feed import RowSender, SentRows
from trainer.engine.observe.metrics import MetricsLog
from trainer.engine.observe.tables import TensorBoard, TrackerConfig

pytestmark = pytest.mark.usefixtures("event_files_in_order")
Sent = dict[str, list[int]]


def client_row(client: str, step: int) -> dict[str, Any]:
    return {"kind": "client", "client": client, "step": step, "time": 1.0, "loss": float(step)}


class Service:
    """A tracking service that is a list for each client, behind the queue of W&B and MLflow."""

    def __init__(self, folder: Path, sent: Sent) -> None:
        steps = sent.setdefault(folder.name, [])
        record = SentRows(folder / "trackers" / "service.json", "place")
        send = lambda row: steps.append(row["step"])  # noqa: E731
        self._feed = RowSender(record, folder / "metrics.jsonl", send)
        self.log, self.close = self._feed.log, self._feed.close


def attempt(run: Path, config: TrackerConfig, steps: range, shown: range) -> None:
    """Log two clients' rows as the observer does, of which the trackers see those of `shown`."""
    run.mkdir(exist_ok=True)
    log = MetricsLog(run / "metrics.jsonl", steps.start - 1)
    trackers = ClientTrackers([config], run)
    for step in steps:
        for client in ("a", "b"):
            log.write(client_row(client, step))
            if step in shown:
                trackers.log(client_row(client, step))
    trackers.close()
    log.close()


def test_a_service_gets_the_rows_that_a_kill_left_unsent(tmp_path: Path) -> None:
    sent: Sent = {}

    class ServiceConfig(TrackerConfig):
        name: str = "service"

        def build(self, run_dir: Path, resume_step: int) -> Service:
            return Service(run_dir, sent)

    run = tmp_path / "run"
    attempt(run, ServiceConfig(), range(1, 5), range(1, 3))
    assert sent == {"run-a": [1, 2], "run-b": [1, 2]}
    attempt(run, ServiceConfig(), range(4, 6), range(4, 6))
    assert sent == {"run-a": [1, 2, 3, 4, 5], "run-b": [1, 2, 3, 4, 5]}


def test_tensorboard_shows_each_round_of_a_client_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    attempt(run, TensorBoard(), range(1, 5), range(1, 4))
    attempt(run, TensorBoard(), range(3, 6), range(3, 6))
    for client in ("a", "b"):
        folder = run / "clients" / f"run-{client}" / "tensorboard"
        assert scalars(folder, "client/loss") == [(step, float(step)) for step in range(1, 6)]
