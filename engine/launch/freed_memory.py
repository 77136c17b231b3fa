"""What the C library does with memory that a process frees. Torch-free."""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGEST_KEPT = 32 * 2**20
"""bytes; the bound up to which glibc raises the threshold by itself"""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let this process keep blocks that it frees, up to 32 MiB each, for its next allocations.

    By default glibc returns the end of its heap to the kernel whenever 64 MiB of it are free. A
    training step then faults in the pages of its gradients again each time, at the cost of 10 % of
    a step of many small experts on a CPU. Other C libraries, and settings in the environment, stay
    as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in SETTINGS):
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, NEVER)
