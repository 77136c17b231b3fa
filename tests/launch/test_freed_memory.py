"""Freed memory that stays in the process, measured by the pages that the kernel has to supply."""

import ctypes
import os
import subprocess
import sys

import pytest

from trainer.engine.launch.freed_memory import SETTINGS

CHILD = """
import ctypes, resource
from trainer.engine.launch.freed_memory import keep_freed_memory

libc, size = ctypes.CDLL(None), 24 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def step():
    blocks = [libc.malloc(size) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

step()
before = step()
given_back = step() - before
keep_freed_memory()
step()
before = step()
print(given_back, step() - before)
"""
has_mallopt = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")


def faults(**environment):
    """Return the page faults of a step before and after the call."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = [sys.executable, "-P", "-c", CHILD]
    child = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return [int(word) for word in child.stdout.split()]


@has_mallopt
def test_the_blocks_of_a_step_are_those_of_the_step_before():
    given_back, kept = faults()
    assert kept < 0.1 * given_back


@has_mallopt
def test_settings_in_the_environment_stay():
    given_back, kept = faults(MALLOC_TRIM_THRESHOLD_="1000000")
    assert kept > 0.5 * given_back
