"""A sweep over tokenizers is sorted by bits per byte: a token of one is not a token of another."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sweep.commands import Command
from trainer.engine.sweep.points import make_points

GRID = 'tokenizer={name="bytes"},{name="hf",path="small"},{name="hf",path="large"}'


def finished_sweep(folder: Path, rows: list[dict[str, float]]) -> list[str]:
    """Leave a finished run at each point; return their names."""
    names = [point.name for point in make_points([GRID], [])]
    for name, row in zip(names, rows, strict=True):
        run = folder / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 4, **row}) + "\n")
        (run / "state.json").write_text('{"total_steps": 4, "outcome": "finished"}')
    return names


def names_in(out: str, names: list[str]) -> list[str]:
    return [line.split()[0] for line in out.splitlines() if line.split()[0] in names]


def test_points_are_sorted_by_bits_per_byte(command: Command, tmp_path: Path) -> None:
    rows = [
        {"loss": 1.0, "bits_per_byte": 1.44},
        {"loss": 3.0, "bits_per_byte": 1.1},
        {"loss": 4.0, "bits_per_byte": 1.2},
    ]
    byte, small, large = names = finished_sweep(tmp_path / "runs/sweeps/r", rows)
    code, out, _ = command("sweep", "r.toml", "--grid", GRID)
    assert code == 0
    assert names_in(out, names)[-3:] == [small, large, byte]
    assert "BITS/BYTE" in out
    assert "the tokenizers differ: sorted by bits per byte" in out
    _, out, _ = command("sweep", "r.toml", "--grid", GRID, "--json")
    assert [point["bits_per_byte"] for point in json.loads(out)["points"]] == [1.1, 1.2, 1.44]


def test_without_bits_per_byte_no_point_is_better(command: Command, tmp_path: Path) -> None:
    rows = [{"loss": 2.0, "bits_per_byte": 1.44}, {"loss": 3.0}, {"loss": 1.0}]
    names = finished_sweep(tmp_path / "runs/sweeps/r", rows)
    _, out, _ = command("sweep", "r.toml", "--grid", GRID)
    assert names_in(out, names)[-3:] == names
    assert "cannot be compared" in out
