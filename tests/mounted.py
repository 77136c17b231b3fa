"""A file system of a few megabytes in memory."""

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted_tmpfs(folder, megabytes):
    """Make a folder that holds so many megabytes; skip the test where nothing can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
