"""The task of docs/guide/plugins.md: on one and two ranks, resumed, and in the report."""

import json
import re
import shutil
from pathlib import Path

import pytest

import trainer
from tests.commands import run_trainer
from tests.docs.blocks import blocks

PAGE = Path(trainer.__file__).parent.resolve() / "docs/guide/plugins.md"
SETTINGS = ["run.steps=20", "metrics.interval=1", "evaluate.interval=10", "checkpoint.interval=10"]


def trainer_command(folder, *words, ranks=1):
    done = run_trainer(*words, folder=folder, path=[folder], ranks=ranks)
    assert done.returncode == 0, done.stderr


def train(folder, ranks=1):
    settings = [f"--set={setting}" for setting in SETTINGS]
    trainer_command(folder, "run", "waves.toml", *settings, ranks=ranks)
    rows = map(json.loads, (folder / "runs/waves/metrics.jsonl").read_text().splitlines())
    keys = ("loss", "grad_norm", "near")
    return {(row["kind"], row["step"]): [row.get(key, 0.0) for key in keys] for row in rows}


def test_a_whole_task_is_one_file_of_a_plugin(tmp_path):
    files = {block.words[0]: block.text for block in blocks(PAGE) if block.words}
    assert len(files["waves.py"].splitlines()) < 100
    for name in ("waves.py", "waves.toml"):
        (tmp_path / name).write_text(files[name])
    alone = train(tmp_path)
    assert len(alone) == 22
    trainer_command(tmp_path, "report", "runs/waves")
    assert re.search(r"\bnear\b", (tmp_path / "runs/waves/report.html").read_text())
    shutil.rmtree(tmp_path / "runs/waves/checkpoints/step-00000020")
    assert train(tmp_path) == alone
    shutil.rmtree(tmp_path / "runs")
    for place, numbers in train(tmp_path, ranks=2).items():
        assert numbers == pytest.approx(alone[place], rel=1e-4), place
