"""Recipes train on a GPU as on a CPU, eager and compiled: `make test-gpu`."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.child import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPES = ("llama3", "moe", "gpt_oss", "llama4", "deepseek_v3", "sequence_classification")
STEPS = 4
QUIET = [
    "metrics.interval=1",
    "evaluate.interval=2",
    "evaluate.steps=1",
    "resilience.non_finite=skip",
    f"run.steps={STEPS}",
    "schedule.warmup_steps=1",
]


def run_fresh(command, recipe, *words, device="cuda"):
    """Run a command in a process that has not used CUDA, and return how it ended."""
    path = os.pathsep.join(filter(None, [str(ROOT / ".dev"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    file = str(ROOT / "recipes" / f"{recipe}_debug.toml")
    given = ["--compile", file] if command == "doctor" else [file]
    line = [sys.executable, "-P", "-m", "trainer", command, *given, *words]
    return subprocess.run(line, env=env, capture_output=True, text=True)


def train(folder, name, recipe, *settings, device="cuda"):
    """Return the losses of all training steps and validations of a run."""
    settings = (*QUIET, f"run.dir={folder}", f"run.name={name}", *settings)
    done = run_fresh("run", recipe, *(f"--set={each}" for each in settings), device=device)
    log = folder / name / "logs" / "rank-0.log"
    assert done.returncode == 0, done.stderr + (log.read_text()[-6000:] if log.exists() else "")
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory):
    """Give the losses of steps on a CPU in fp32, and the weights they started from."""
    known = {}

    def find(recipe):
        if recipe not in known:
            folder = tmp_path_factory.mktemp(recipe)
            settings = ("precision.compute=fp32", "optimizer.lr=1e-30")
            train(folder, "start", recipe, *settings, device="cpu")
            start = f"run.init_from={folder / 'start'}"
            losses = train(folder, "cpu", recipe, start, "precision.compute=fp32", device="cpu")
            known[recipe] = start, losses
        return known[recipe]

    return find


@pytest.mark.parametrize("compiled", ["false", "true"], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_trains_as_a_cpu(recipe, compiled, on_a_cpu, tmp_path):
    start, expected = on_a_cpu(recipe)
    compiling = f"compile.enabled={compiled}"
    exact = train(tmp_path, "fp32", recipe, start, compiling, "precision.compute=fp32")
    assert exact == pytest.approx(expected, rel=1e-4)
    rounded = train(tmp_path, "bf16", recipe, start, compiling)
    assert rounded == pytest.approx(expected, rel=1e-2)


SETTINGS = {
    "documents": ("llama3", ["data.packing=documents"]),
    "float8": ("llama3", ["precision.float8.enabled=true", "compile.enabled=true"]),
    "muon": ("llama3", ["optimizer.name=muon"]),
    "recomputed": ("llama3", ["memory.recompute=full"]),
    "selective": ("llama3", ["memory.recompute=selective", "compile.enabled=true"]),
    "FSDP of one rank": ("llama3", ["parallel.shard=1"]),
    "ragged": ("sequence_classification", ["data.packing=ragged"]),
    "Triton's products": ("moe", ["kernels.grouped_gemm=triton", "kernels.rms_norm=triton"]),
    "fused experts": ("moe", ["kernels.moe=fused"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_trains_on_a_gpu(name, tmp_path):
    recipe, settings = SETTINGS[name]
    losses = train(tmp_path, "run", recipe, *settings)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("command", ["plan", "estimate-memory", "doctor"])
def test_a_machine_with_a_gpu_simulates_runs(command):
    words = ["--set=memory.recompute=full", "--set=compile.enabled=true", "--world=2"]
    done = run_fresh(command, "llama3", *words)
    assert done.returncode == 0, done.stderr
