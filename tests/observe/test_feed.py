"""What W&B and MLflow have in common, with a service that is a list."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.engine.observe.feed import RowSender, SentRows, extract_scalars, label_row
from trainer.engine.observe.metrics import MetricsLog

Sent = list[tuple[str, int, float]]
ROWS = ({"kind": "train"}, {"kind": "eval"}, {"kind": "eval", "split": "books"})
LABELS = ("train", "eval", "eval/books")


def attempt(folder: Path, resume_step: int, last: int, sent: Sent, loss: float) -> None:
    """Log the steps of one attempt, as the observer does: first the file, then the tracker."""
    log = MetricsLog(folder / "metrics.jsonl", resume_step)
    feed = RowSender(
        SentRows(folder / "trackers" / "service.json", "place"),
        log.path,
        lambda row: sent.append((label_row(row), row["step"], row["loss"])),
    )
    for step in range(resume_step + 1, last + 1):
        for each in ROWS:
            row = {**each, "step": step, "loss": loss}
            log.write(row)
            feed.log(row)
    feed.close()
    log.close()


def test_each_row_is_sent_once_and_steps_only_grow_over_all_attempts(tmp_path: Path) -> None:
    sent: Sent = []
    attempt(tmp_path, 0, 5, sent, 1.0)
    attempt(tmp_path, 3, 7, sent, 2.0)
    attempt(tmp_path, 7, 8, sent, 3.0)
    assert [(label, step) for label, step, _ in sent] == [
        (label, step) for step in range(1, 9) for label in LABELS
    ]


def test_what_was_never_sent_is_sent_by_the_next_attempt(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        log.write({"kind": "train", "step": step, "loss": 0.5})
    log.close()
    SentRows(tmp_path / "trackers" / "service.json", "place").add({"kind": "train", "step": 1})
    sent: Sent = []
    attempt(tmp_path, 3, 4, sent, 1.0)
    assert [step for kind, step, _ in sent if kind == "train"] == [2, 3, 4]


def test_rows_of_clients_are_left_to_the_trackers_of_the_clients(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    for kind in ("client", "client", "round"):
        log.write({"kind": kind, "step": 4, "loss": 0.5})
    log.close()
    sent: Sent = []
    attempt(tmp_path, 4, 4, sent, 1.0)
    assert [label for label, _, _ in sent] == ["round"]


def test_a_failure_is_told_and_leaves_the_rows_for_later(tmp_path: Path) -> None:
    tried = threading.Event()

    def refuse(row: Mapping[str, Any]) -> None:
        tried.set()
        raise ConnectionError("no route")

    record = SentRows(tmp_path / "trackers" / "service.json", "place")
    feed = RowSender(record, tmp_path / "metrics.jsonl", refuse)
    feed.log({"kind": "train", "step": 1, "loss": 1.0})
    assert tried.wait(10)
    with pytest.raises(ConnectionError):
        feed.close()
    with pytest.raises(ConnectionError):
        feed.log({"kind": "train", "step": 2, "loss": 1.0})
    assert SentRows(tmp_path / "trackers" / "service.json", "place").step == -1


def test_a_slow_service_does_not_hold_up_a_step(tmp_path: Path) -> None:
    gate = threading.Event()
    sent: list[int] = []

    def wait(row: Mapping[str, Any]) -> None:
        assert gate.wait(10)
        sent.append(row["step"])

    feed = RowSender(
        SentRows(tmp_path / "trackers" / "s.json", ""), tmp_path / "metrics.jsonl", wait
    )
    for step in range(100):
        feed.log({"kind": "train", "step": step})
    assert sent == []
    gate.set()
    feed.close()
    assert sent == list(range(100))


def test_the_record_belongs_to_one_place_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "trackers" / "s.json"
    record = SentRows(path, "a")
    record.begin("id-1")
    record.add({"kind": "train", "step": 4})
    assert (SentRows(path, "a").run_id, SentRows(path, "a").step) == ("id-1", 4)
    assert (SentRows(path, "b").run_id, SentRows(path, "b").step) == ("", -1)
    for text in ("", "[]", '{"target": "a", "step": "x"}'):
        path.write_text(text)
        assert SentRows(path, "a").run_id == ""


def test_only_numbers_are_sent() -> None:
    row = {"kind": "eval", "step": 1, "time": 2.0, "loss": 3, "mfu": None, "note": "x", "on": True}
    assert extract_scalars(row) == {"eval/loss": 3.0}
    assert extract_scalars({**row, "split": "validation"}) == {"eval/loss": 3.0}
    assert extract_scalars({**row, "split": "books"}) == {"eval/books/loss": 3.0}
