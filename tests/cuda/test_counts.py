"""Steps on a GPU that is not there wait, mask and launch as often as is written down."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
PINNED = json.loads(Path(__file__).with_name("counts.json").read_text("utf-8"))
QUICK = ("llama3_debug", "documents", "expert")
pytestmark = [
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler"
    ),
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="torch is built with CUDA, which cannot be replaced"
    ),
]


def run(*words):
    """Count in a process of its own, because the GPU stays in it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def compare(names):
    counted = run("count", *names)
    different = {
        name: {
            key: f"{PINNED.get(name, {}).get(key)} -> {value}"
            for key, value in counts.items()
            if PINNED.get(name, {}).get(key) != value
        }
        for name, counts in counted.items()
    }
    different = {name: keys for name, keys in different.items() if keys}
    assert not different, (
        f"{json.dumps(different, indent=2)}\nIf this is meant: python -m tests.cuda, and say why"
    )


def test_every_case_is_pinned():
    assert set(PINNED) == set(CASES)


def test_steps_cost_what_is_pinned():
    compare(QUICK)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(4))
def test_steps_of_all_cases_cost_what_is_pinned(first):
    compare([name for name in CASES if name not in QUICK][first::4])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_counter_sees_what_it_counts():
    found, usual = run("damage"), PINNED["llama3_debug"]
    assert not usual["waits"]
    assert not usual["mask_bytes"]
    batches = 2  # of llama3_debug's step
    assert found["item"]["waits"] == {"_local_scalar_dense": batches}
    assert found["nonzero"]["waits"] == {"nonzero": batches}
    copies = {"copy cpu to cuda": batches, "copy cuda to cpu": batches}
    assert found["copy_to_host"]["waits"] == copies
    # One in the forward pass, one in the backward pass.
    assert found["kernel"]["kernels"] == usual["kernels"] + 2 * batches
    sequence, layers = 256, 4
    assert found["mask"]["mask_bytes"] == sequence * sequence * layers * batches
    compiled = PINNED["llama3_debug compiled"]
    assert compiled["graph_breaks"] == []
    assert found["graph_break"]["graph_breaks"]
    assert found["graph_break"]["graphs"] > compiled["graphs"]
