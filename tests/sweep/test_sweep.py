"""Sweeps at the command line: checked first, run in turn, gone on with, reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.commands import GRID, RECIPE, Command, environment
from trainer.engine.core.errors import ExitCode
from trainer.engine.sweep import runner


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for the processes: note each command line, and leave a run that took one step."""
    started: list[list[str]] = []

    def launch(command: list[str], nproc: int, *, log_dir: Path, **_: Any) -> int:
        started.append(command[command.index("run") :])
        lr = next(word for word in command if "optimizer.lr=" in word).partition("lr=")[2]
        log_dir.mkdir(parents=True)
        loss = json.dumps(-float(lr) if lr != "5.0" else "NaN")
        row = f'{{"kind": "eval", "step": 4, "loss": {loss}, "time": 1.0}}\n'
        (log_dir.parent / "metrics.jsonl").write_text(row)
        if lr == "0.5":
            return ExitCode.DIVERGED
        (log_dir.parent / "state.json").write_text('{"total_steps": 4, "outcome": "finished"}')
        return ExitCode.STOPPED_AND_SAVED if lr == "0.75" else ExitCode.DONE

    monkeypatch.setattr(runner, "launch", launch)
    return started


def test_every_point_is_checked_before_the_first_runs(
    command: Command, runs: list[list[str]], tmp_path: Path
) -> None:
    code, _, err = command(
        "sweep", "r.toml", "--grid", "optimizer.lr=1e-3,-1", "--grid", "model.dim=32,x",
        "--set", "data.seq_len=0",
    )  # fmt: skip
    assert code == 2
    assert err.splitlines() == [
        "error: --set: data.seq_len: expected at least 1, got 0",
        'error: --set: model.dim: expected an integer, got "x" (at lr-1e-3_dim-x, lr--1_dim-x)',
        "error: --set: optimizer.lr: expected at least 0, got -1 (at lr--1_dim-32, lr--1_dim-x)",
    ]
    assert runs == []
    assert not (tmp_path / "runs").exists()


def test_points_run_in_turn_and_the_table_has_the_best_first(
    command: Command, runs: list[list[str]], tmp_path: Path
) -> None:
    code, out, _ = command("sweep", "r.toml", "--grid", "optimizer.lr=0.1,5.0,0.3", "--nproc", "2")
    assert code == 0
    folder = "runs/sweeps/r"
    assert runs[0] == [
        "run", "r.toml", "--set=optimizer.lr=0.1", f'--set=run.dir="{folder}"',
        '--set=run.name="lr-0.1"',
    ]  # fmt: skip
    table = [line.split()[0] for line in out.splitlines() if line.startswith("lr-")]
    assert table == ["lr-0.3", "lr-0.1", "lr-5.0"], "what is no number comes last"
    assert out.splitlines()[-1] == f"report: {folder}/report.html"
    assert "Sweep r: 3 runs" in (tmp_path / folder / "report.html").read_text()
    manifest = json.loads((tmp_path / folder / "sweep.json").read_text())
    assert [point["name"] for point in manifest["points"]] == ["lr-0.1", "lr-5.0", "lr-0.3"]


def test_a_sweep_of_an_experiment_lies_in_its_folder(
    command: Command, runs: list[list[str]], tmp_path: Path
) -> None:
    code, out, _ = command(
        "sweep", "r.toml", "--grid", "optimizer.lr=0.1", "--set", "run.experiment=widths"
    )
    assert code == 0
    assert out.splitlines()[-1] == "report: runs/widths/sweeps/r/report.html"
    assert (tmp_path / "runs/widths/sweeps/r/lr-0.1/metrics.jsonl").is_file()


def test_finished_points_are_skipped_and_a_sweep_may_grow(
    command: Command, runs: list[list[str]], tmp_path: Path
) -> None:
    command("sweep", "r.toml", "--grid", "optimizer.lr=0.1,0.2")
    code, out, _ = command("sweep", "r.toml", "--grid", "optimizer.lr=0.2,0.3", "--json")
    assert code == 0
    assert len(runs) == 3
    found = json.loads(out)
    assert [point["name"] for point in found["points"]] == ["lr-0.3", "lr-0.2"]
    assert found["points"][0]["validation_loss"] == -0.3
    assert "Sweep r: 3 runs" in (tmp_path / found["report"]).read_text()


def test_a_failure_ends_the_sweep_or_is_passed_over_and_shows_in_the_exit_code(
    command: Command, runs: list[list[str]]
) -> None:
    grid = ("--grid", "optimizer.lr=0.1,0.5,0.2")
    code, out, _ = command("sweep", "r.toml", *grid)
    assert (code, len(runs)) == (ExitCode.DIVERGED, 2)
    assert "[2/3] lr-0.5: failed with exit code 6" in out
    assert "not started" in out
    code, _, _ = command("sweep", "r.toml", *grid, "--continue-on-error", "--dir", "else")
    assert (code, len(runs)) == (ExitCode.DIVERGED, 5)


def test_a_stop_ends_the_sweep_with_its_code(command: Command, runs: list[list[str]]) -> None:
    code, _, _ = command("sweep", "r.toml", "--grid", "optimizer.lr=0.1,0.75,0.2")
    assert (code, len(runs)) == (ExitCode.STOPPED_AND_SAVED, 2)


def test_a_folder_of_another_recipe_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.report.folders import make_run
    from tests.report.test_status import save_checkpoint

    run = make_run(tmp_path / "s" / "lr-1e-3", [], RECIPE + "[optimizer]\nlr = 1e-3\n")
    save_checkpoint(run, 2)
    assert command("sweep", "r.toml", *GRID, "--dir", "s", "--dry-run")[0] == 0
    code, _, err = command("sweep", "r.toml", *GRID, "--dir", "s", "--set", "run.seed=7")
    assert code == 2
    assert "run.seed: is 7 now, and 0 in s/lr-1e-3 (at lr-1e-3); give this sweep another" in err


def test_a_dry_run_shows_the_points_and_writes_nothing(
    command: Command, runs: list[list[str]], tmp_path: Path
) -> None:
    code, out, _ = command("sweep", "r.toml", *GRID, "--dry-run", "--json")
    assert code == 0
    points = json.loads(out)["points"]
    assert [point["set"] for point in points] == [["optimizer.lr=1e-3"], ["optimizer.lr=1e-2"]]
    assert {point["state"] for point in points} == {"not started"}
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


def test_a_damaged_manifest_names_no_folder_outside(
    command: Command, runs: list[list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "sweeps" / "r"
    folder.mkdir(parents=True)
    for text in ('{"points": [{"name": "../../..", "settings": []}]}', "{", '{"points": 3}'):
        (folder / "sweep.json").write_text(text)
        assert command("sweep", "r.toml", *GRID)[0] == 0
        manifest = json.loads((folder / "sweep.json").read_text())
        assert [point["name"] for point in manifest["points"]] == ["lr-1e-3", "lr-1e-2"]


def test_bad_usage_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("sweep", "nosuch.toml", *GRID)[0] == 2
    code, _, err = command("sweep", "r.toml", *GRID, "--index", "2")
    assert (code, "--index 2: the points are 0 to 1" in err) == (2, True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, _, err = command("sweep", "r.toml", *GRID)
    assert (code, "a sweep inside a job of torchrun" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_sweep_stopped_by_a_signal_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE.replace("steps = 4", "steps = 3000", 1))
    arguments = [sys.executable, "-P", "-m", "trainer", "sweep", "r.toml", *GRID, "--json"]
    environ = environment(tmp_path)
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "sweeps" / "r" / "lr-1e-3" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    holder = json.loads((metrics.parent / ".lock").read_text())["pid"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    points = {point["name"]: point for point in json.loads(out)["points"]}
    assert points["lr-1e-3"]["state"] == "stopped"
    assert points["lr-1e-2"]["state"] == "not started"
    with pytest.raises(ProcessLookupError):
        os.kill(holder, 0)
    stopped_at = points["lr-1e-3"]["step"]
    done = subprocess.run(
        [*arguments, "--set", "run.steps=3000", "--dry-run"], cwd=tmp_path, env=environ,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, "the recipe fits what was begun"
    assert 0 < stopped_at < 3000
    last = ["--set", f"run.steps={stopped_at + 5}"]
    done = subprocess.run(
        [*arguments, *last], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert f"training from step {stopped_at + 1} to {stopped_at + 5}" in done.stderr
    assert {point["state"] for point in json.loads(done.stdout)["points"]} == {"finished"}
