"""The benchmark of mixtures measures models that are the same."""

import subprocess
import sys

import pytest

from tests.kernels.child import ROOT


@pytest.mark.matrix
@pytest.mark.slow
def test_a_bare_loop_and_transformers_have_our_loss():
    """The script compares losses before it goes on."""
    options = ["--rounds", "2", "--size", "few", "--dtype", "fp32"]
    command = [sys.executable, "benchmarks/moe.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("bare loop", "trainer", "transformers Mixtral"))
