"""A sweep as a SLURM job array."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.sweep.commands import GRID, Command, environment


def test_an_array_runs_each_point_and_the_last_one_reports(
    command: Command, tmp_path: Path
) -> None:
    """With stand-ins for SLURM's own programs."""
    code, out, _ = command("sweep", "r.toml", *GRID, "--slurm", "--dir", "s")
    assert (code, out) == (0, "s/sweep.sbatch: 2 points; now: sbatch s/sweep.sbatch\n")
    script = tmp_path / "s" / "sweep.sbatch"
    assert "#SBATCH --array=0-1\n" in script.read_text()
    for index in ("0", "1"):
        assert not (tmp_path / "s" / "report.html").exists()
        done = subprocess.run(
            ["bash", script], env=environment(tmp_path, SLURM_ARRAY_TASK_ID=index),
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "all 2 points are finished: s/report.html" in done.stdout
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / "s" / "report.html").exists()


def test_folders_with_odd_names_are_quoted_in_a_batch_script(
    command: Command, tmp_path: Path
) -> None:
    code, out, _ = command("sweep", "r.toml", *GRID, "--slurm", "--dir", "a b%j")
    assert (code, out.endswith("now: sbatch 'a b%j/sweep.sbatch'\n")) == (0, True)
    options = [
        shlex.split(line.removeprefix("#SBATCH "))
        for line in (tmp_path / "a b%j" / "sweep.sbatch").read_text().splitlines()
        if line.startswith("#SBATCH ")
    ]
    assert {len(words) for words in options} == {1}
    assert ["--output=a b%%j/logs/%A_%a.out"] in options


def test_a_stopped_element_is_queued_again(command: Command, tmp_path: Path) -> None:
    command("sweep", "r.toml", *GRID, "--slurm", "--dir", "s")
    (tmp_path / "stop").write_text("#!/bin/sh\nexit 75\n")
    text = (tmp_path / "s" / "sweep.sbatch").read_text()
    shutil.copy(tmp_path / "stop", tmp_path / "python")
    text = text.replace(f"srun {sys.executable}", "srun sh ./python")
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "42"}
    done = subprocess.run(
        ["bash", "-c", text], env=environment(tmp_path, **slurm), cwd=tmp_path, timeout=60
    )
    assert done.returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 42_1\n"
