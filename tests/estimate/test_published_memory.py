"""Estimated memory beside the peaks that other engines published."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.engine.estimate.simulate.extrapolate import simulate_memory
from trainer.engine.recipe.load import load_recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = """
[run]
steps = 1
[model]
name = "llama3"
n_layers = 4
vocab_size = 32000
[data]
seq_len = 64
global_batch = 2
micro_batch = 2
[[data.sources]]
name = "synthetic"
[precision]
compute = "bf16"
[memory]
recompute = "selective"
recompute_keep = ["mm"]
"""


def test_compiled_blocks_do_not_keep_the_product_that_only_a_sum_reads(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL)
    held = {}
    for is_compiled in (False, True):
        loaded = load_recipe(recipe, [f"compile.enabled={is_compiled}".lower()], 1).recipe
        found = simulate_memory(loaded, 0, 1, 32_000, on_gpu=True, whole=True)
        held[is_compiled] = found.at_peak["activations"]
    width = loaded.model.with_vocab(32_000).dim
    # The output of each block's feed-forward layer, in bf16.
    assert held[False] - held[True] == 4 * (2 * 64) * width * 2


@pytest.mark.matrix
@pytest.mark.slow
def test_published_peaks_are_met_within_seven_percent():
    line = [sys.executable, str(BENCHMARKS / "memory.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1200, check=True)
    report = json.loads(done.stdout[done.stdout.index("\n{") :])
    with (BENCHMARKS / "published.csv").open() as file:
        published = {row["name"] for row in csv.DictReader(file) if row["memory_gib"]}
    compared = {row["name"] for row in report["rows"]}
    assert len(compared) >= 20
    assert compared | set(report["left_out"]) == published
    assert not compared & set(report["left_out"])
    errors = {row["name"]: row["error"] for row in report["rows"] if abs(row["error"]) > 0.07}
    assert errors == {}
