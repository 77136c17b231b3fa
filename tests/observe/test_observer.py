from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.core.run_dir import RunDirectory
from trainer.engine.observe.metrics import read
from trainer.engine.observe.numbers import to_floats
from trainer.engine.observe.observer import Observer
from trainer.engine.observe.progress import Progress
from trainer.engine.observe.tables import Metrics, TensorBoard
from trainer.engine.observe.throughput import Throughput


class Screen(Progress):
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.steps: list[int] = []
        self.warnings: list[str] = []

    def advance(self, step: int) -> None:
        self.steps.append(step)

    def show(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def observer(path: Path, rank: int = 0, total: int = 25, **table: Any) -> Observer:
    return Observer(
        Metrics(**table),
        RunDirectory(path),
        rank,
        total,
        Screen(),
        Throughput("tokens", lambda batches: {"samples": 8 * batches}, lambda *_: 6e3, 1e12),
        memory=lambda: 123,
    )


def watch(observed: Observer, first: int, last: int) -> None:
    observed.start(first - 1, (first - 1) * 100)
    for step in range(first, last + 1):
        loss = torch.tensor(1 / step, dtype=torch.float32)
        tokens = torch.tensor(step * 100)
        observed.on_step(step, {"loss": loss, "grad_norm": loss * 2, "lr": 1e-3}, tokens, step)
        if step % 5 == 0:
            observed.on_evaluation(step, {"loss": loss}, "validation")
    observed.close()


def test_rows_are_written_at_the_first_step_the_interval_and_the_last(tmp_path: Path) -> None:
    watch(observed := observer(tmp_path), 1, 25)
    rows = [row for row in read(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 10, 20, 25]
    row = rows[1]
    assert list(row)[:6] == ["kind", "step", "loss", "grad_norm", "lr", "tokens"]
    assert row["loss"] == float(torch.tensor(0.1)), "all bits of the fp32 value"
    assert (row["tokens"], row["memory_bytes"]) == (1000, 123)
    assert isinstance(row["tokens"], int)
    assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(100)
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 6e3 / 1e12)
    screen = observed._progress
    assert isinstance(screen, Screen)
    assert len(screen.steps) == 21


def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    watch(observer(tmp_path / "a", interval=3), 1, 25)
    watch(observer(tmp_path / "b", interval=3), 1, 18)
    watch(observer(tmp_path / "b", interval=3), 11, 25)
    keys = ("kind", "step", "loss", "grad_norm", "lr", "tokens")
    one, two = (
        [[row.get(key) for key in keys] for row in read(tmp_path / name / "metrics.jsonl")]
        for name in "ab"
    )
    assert one == two


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    watch(observer(tmp_path, rank=1), 1, 25)
    assert list(tmp_path.iterdir()) == []


def test_all_values_come_from_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(1) or tolist(self))
    monkeypatch.setattr(torch.Tensor, "item", None)
    values = {
        "b": torch.tensor(1.5, dtype=torch.bfloat16),
        "a": 0.1,
        "n": torch.tensor(2**52 + 1),
        "x": torch.tensor(float("nan")),
    }
    floats = to_floats(values)
    assert list(floats) == ["b", "a", "n", "x"]
    assert (floats["b"], floats["a"], floats["n"]) == (1.5, 0.1, 2**52 + 1)
    assert floats["x"] != floats["x"]
    assert len(copies) == 1


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, row: Mapping[str, Any]) -> None:
        self.calls += 1
        raise ConnectionError("no route")

    def close(self) -> None:
        raise AssertionError("left out trackers are not closed")


def test_a_tracker_that_fails_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    observed = observer(tmp_path)
    observed.start(0, 0)
    tracker = Broken()
    observed._trackers.append(tracker)
    for step in (10, 20):
        observed.on_step(step, {"loss": 1.0}, step, step)
    observed.close()
    assert tracker.calls == 1
    screen = observed._progress
    assert isinstance(screen, Screen)
    assert screen.warnings == ["Broken failed and is left out from now on: no route"]


@pytest.mark.parametrize("error", [OSError("full"), EnvironmentFault("down"), KeyError("odd")])
def test_a_tracker_that_cannot_be_built_stops_a_start_but_no_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(TensorBoard, "build", fail)
    observed = observer(tmp_path, tensorboard=True)
    with pytest.raises(EnvironmentFault, match=str(error)):
        observed.start(0, 0)
    observed.start(10, 100)
    observed.on_step(20, {"loss": 1.0}, 20, 20)
    observed.close()
    screen = observed._progress
    assert isinstance(screen, Screen)
    assert screen.warnings == [f"the tracker tensorboard is left out of this attempt: {error}"]
    assert [row["step"] for row in screen.rows] == [20]


def test_a_full_disk_costs_a_row_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = observer(tmp_path)
    observed.start(0, 0)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        observed.on_step(10, {"loss": 1.0}, 10, 10)
    observed.on_step(20, {"loss": 1.0}, 20, 20)
    observed.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [20]
    screen = observed._progress
    assert isinstance(screen, Screen)
    assert "No space left on device" in screen.warnings[0]
