"""No kernel reads or writes outside of its tensors: compute-sanitizer, of the CUDA toolkit."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.kernels.child import ROOT
from tests.kernels.gpu.every_kernel import everything

SANITIZER = shutil.which("compute-sanitizer")
needs_a_sanitizer = pytest.mark.skipif(
    not (SANITIZER and torch.cuda.is_available()), reason="needs a GPU and compute-sanitizer"
)
FOUND = 9


def sanitized(*words):
    """Return how a process of `every_kernel` ended, in which each tensor is allocated by itself."""
    folders = [str(ROOT), str(ROOT / ".dev"), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    module = [sys.executable, "-P", "-m", "tests.kernels.gpu.every_kernel", *words]
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", str(FOUND), *module]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_what_is_sanitized_runs():
    everything()


@needs_a_sanitizer
@pytest.mark.timeout(1200)
def test_nothing_reads_or_writes_outside_of_its_tensors():
    done = sanitized()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


@needs_a_sanitizer
def test_a_write_outside_of_a_tensor_is_seen():
    assert sanitized("wrong").returncode == FOUND
