from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.engine.observe.metrics import MetricsLog, read

ROOT = Path(__file__).resolve().parents[2]


def write_steps(path: Path, resume_step: int, last: int) -> None:
    log = MetricsLog(path, resume_step)
    for step in range(resume_step + 1, last + 1):
        log.write({"kind": "train", "step": step, "loss": 1 / step})
        if step % 3 == 0:
            log.write({"kind": "eval", "step": step, "loss": 2 / step})
    log.close()


def keys(path: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in read(path)]


def test_a_resumed_file_is_that_of_an_uninterrupted_run_wherever_it_was_cut(tmp_path: Path) -> None:
    """Cut at each byte after the rows of step 3, where the checkpoint is, and go on from there."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write_steps(whole, 0, 8)
    data = whole.read_bytes()
    saved = data.index(b'{"kind": "train", "step": 4')
    for end in range(saved, len(data) + 1):
        cut.write_bytes(data[:end])
        write_steps(cut, 3, 8)
        assert cut.read_bytes() == data


def test_later_steps_are_dropped_and_the_evaluation_at_the_resumed_step_stays(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 7)
    MetricsLog(path, 3).close()
    assert keys(path) == [("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
    MetricsLog(path, 0).close()
    assert path.read_bytes() == b""


def test_a_rollback_drops_what_it_undoes(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        log.write({"kind": "train", "step": step, "loss": 0.5})
    log.rewind(1)
    log.write({"kind": "train", "step": 2, "loss": 0.25})
    assert [row["loss"] for row in read(log.path)] == [0.5, 0.25]
    log.close()


def test_floats_keep_each_bit(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    values = [
        0.1,
        1 / 3,
        5e-324,
        1.7976931348623157e308,
        -0.0,
        struct.unpack("f", b"\x01\2\3\4")[0],
    ]
    log.write({"kind": "train", "step": 1, **{str(i): value for i, value in enumerate(values)}})
    log.close()
    row = read(log.path)[0]
    assert [struct.pack("d", row[str(i)]) for i in range(len(values))] == [
        struct.pack("d", value) for value in values
    ]


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"kind": "train", "step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": None})
    log.close()

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    strict = json.loads(log.path.read_text(), parse_constant=refuse)
    assert strict["a"] == "NaN"
    row = read(log.path)[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"], row["kind"]) == (math.inf, -math.inf, None, "train")


def test_each_row_is_on_disk_when_it_is_written(tmp_path: Path) -> None:
    """A process that is killed right after the call loses nothing."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from trainer.engine.observe.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]), 0)\n"
        "for step in (1, 2): log.write({'kind': 'train', 'step': step})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    subprocess.run([sys.executable, "-c", code, path], env=environ)
    assert keys(path) == [("train", 1), ("train", 2)]


def test_a_disk_that_was_full_for_a_while_costs_only_the_rows_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    write = os.write
    log.write({"kind": "train", "step": 1})
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:9]))
    log.write({"kind": "train", "step": 2})
    monkeypatch.setattr(os, "write", write)
    log.write({"kind": "train", "step": 3})
    log.write({"kind": "train", "step": 4})
    assert [step for _, step in keys(log.path)] == [1, 3, 4]
    log.close()
