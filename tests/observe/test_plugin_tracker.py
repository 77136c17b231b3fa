"""A tracker of a package outside the trainer gets every row of every attempt."""

from __future__ import annotations

from pathlib import Path

from tests.commands import run_trainer

SAMPLE_PLUGIN = Path(__file__).resolve().parents[1] / "plugin"
RECIPE = """\
[run]
steps = 4
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
[[data.sources]]
name = "synthetic"
[schedule]
name = "constant"
[evaluate]
interval = 2
steps = 1
[metrics]
interval = 1
[[metrics.trackers]]
name = "tally"
file = "counted.txt"
[plugins]
modules = ["trainer_sample"]
"""


def run(folder: Path, *options: str) -> None:
    cache = str(folder / "cache")
    words = "run", "r.toml", *options
    done = run_trainer(*words, folder=folder, path=[SAMPLE_PLUGIN], XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stderr


def test_a_plugin_s_tracker_sees_the_rows_of_each_attempt(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    run(tmp_path)
    run(tmp_path, "--set", "run.steps=5")
    assert (tmp_path / "runs" / "r" / "counted.txt").read_text().splitlines() == [
        "train 1", "train 2", "eval 2", "train 3", "train 4", "eval 4", "end",
        "train 5", "eval 5", "end",
    ]  # fmt: skip
