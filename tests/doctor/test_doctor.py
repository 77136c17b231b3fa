from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.commands import run_trainer
from trainer.engine.doctor.machine import write_speed


def doctor(*arguments: str, cwd: Path, **env: str) -> tuple[int, str]:
    done = run_trainer("doctor", *arguments, folder=cwd, path=[cwd], **env)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_healthy_machine(tmp_path: Path) -> None:
    code, out = doctor("--json", cwd=tmp_path)
    report = json.loads(out)
    texts = {finding["subject"]: finding["text"] for finding in report["findings"]}
    assert (code, report["healthy"]) == (0, True)
    assert torch.__version__.startswith(texts["torch"]), "the build (+cpu, +cu130) may be left out"
    assert "a group of one process works" in texts["gloo"]
    assert texts["kernel rms_norm"].startswith("torch: ")
    if not torch.cuda.is_available():
        assert "this is a CPU" in texts["kernels by triton"]
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


RECIPE = """
[run]
steps = 1
[model]
dim = 32
n_layers = 3
n_heads = 4
n_kv_heads = 2
ffn_dim = 64
[data]
seq_len = 64
micro_batch = 2
"""
BREAKS = """
import time
from trainer.model_zoo.layers.dense import GatedMLP

forward = GatedMLP.forward

def slow(self, x, token_weights=None):
    time.sleep(0)
    return forward(self, x)

GatedMLP.forward = slow
"""


@pytest.mark.matrix
def test_what_a_recipe_compiles_is_traced_without_its_data(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    code, out = doctor("--compile", "recipe.toml", "--json", cwd=tmp_path)
    report = json.loads(out)
    assert (code, report["whole"]) == (0, True)
    block, loss = report["parts"]
    assert (block["part"], block["like_it"], block["graphs"]) == ("layers.0", 2, 1)
    assert block["operations"] > 30
    assert block["recompiled"] == 1, "for any other length of rows"
    assert (loss["part"], loss["graphs"]) == ("loss", 1)


def test_a_graph_that_breaks_is_shown_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + '[plugins]\nmodules = ["breaks"]\n')
    (tmp_path / "breaks.py").write_text(BREAKS)
    split = ("--world", "2", "--set", "parallel.tensor=2", "--set", "memory.recompute=every_n")
    code, out = doctor("--compile", "recipe.toml", *split, cwd=tmp_path)
    assert code == 2
    line = 1 + BREAKS.splitlines().index("    time.sleep(0)")
    assert f" at {tmp_path}/breaks.py:{line}" in out
    graphs = re.search(r"layers\.0 +\d+ +(\d+)", out)
    assert graphs
    assert int(graphs[1]) > 1
