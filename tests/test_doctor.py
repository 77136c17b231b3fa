from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.engine.doctor import write_speed

ROOT = Path(__file__).resolve().parents[1]


def doctor(*arguments: str, cwd: Path, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev"), **env},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_healthy_machine(tmp_path: Path) -> None:
    code, out = doctor("--json", cwd=tmp_path)
    report = json.loads(out)
    texts = {finding["subject"]: finding["text"] for finding in report["findings"]}
    assert (code, report["healthy"]) == (0, True)
    assert torch.__version__.startswith(texts["torch"]), "the build (+cpu, +cu130) may be left out"
    assert "a group of one process works" in texts["gloo"]
    assert "kernel attention" in texts
    assert "MiB/s" in texts["disk"]
    assert list(tmp_path.iterdir()) == [], "looking changes nothing"


@pytest.mark.parametrize(
    ("runs", "env", "subject"),
    [("/proc/runs", {}, "runs folder"), ("runs", {"RANK": "x", "WORLD_SIZE": "2"}, "job")],
)
def test_what_would_fail_a_run_is_bad_and_the_rest_is_still_shown(
    tmp_path: Path, runs: str, env: dict[str, str], subject: str
) -> None:
    code, out = doctor("--runs", runs, cwd=tmp_path, **env)
    assert code == 3
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    states = {subject: state for state, subject, _ in rows}
    assert [name for name, state in states.items() if state == "bad"] == [subject]
    assert states["gloo"] == "ok"


def test_write_speed_is_that_of_its_bytes(tmp_path: Path) -> None:
    assert 2**20 < write_speed(tmp_path / "probe") < 2**40
    assert (tmp_path / "probe").stat().st_size == 2**26
