"""A tiny federated recipe, the command line in this process, and the tensors of a checkpoint."""

import json

import pytest
import torch

from tests.commands import run_in_process
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.checkpoint.reader import read_tensors

PLAIN = """\
[run]
name = "r"
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
micro_batch = 4
[[data.sources]]
name = "synthetic"
[schedule]
name = "constant"
[precision]
compute = "fp32"
[checkpoint]
interval = 1
keep = 100
[evaluate]
interval = 0
"""
RECIPE = (
    PLAIN
    + """\
[federation]
clients = 4
rounds = 4
local_steps = 2
"""
)


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run a command line in a folder with recipe.toml and plain.toml; return code and texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "plain.toml").write_text(PLAIN)

    def command(*arguments):
        return run_in_process(capsys, *arguments)

    return command


@pytest.fixture
def federate(command, tmp_path):
    """Run the recipe with settings, and return the run directory."""

    def federate(name, **settings):
        words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        code, out, errors = command("federate", "run", "recipe.toml", f"--set=run.name={name}",
                                    *words)  # fmt: skip
        assert code == 0, out + errors
        return tmp_path / "runs" / name

    return federate


def tensors(run, step, prefix=""):
    """Return the tensors of a run's checkpoint whose names begin with a prefix."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    manifest = read_manifest(folder)
    state = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }
    read_tensors(folder, manifest, state)
    return state


def rows(run, kind):
    """Return the rows of a kind without what depends on the machine."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    left_out = {"time", "tokens_per_second"}
    return [
        {key: row[key] for key in row if key not in left_out and not key.endswith("seconds")}
        for row in found
        if row["kind"] == kind
    ]


def assert_equal(one, other, tolerance=0.0):
    """Compare tensors by name: bit for bit, or to a tolerance."""
    assert one.keys() == other.keys()
    assert one
    for name, tensor in one.items():
        if tolerance:
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance)
        else:
            assert torch.equal(tensor, other[name]), name
