"""What processes that work for another one do first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def follow_the_parent(parent: int) -> None:
    """Die with the parent process, and leave its signals to it.

    A scheduler signals every process of a job. An orphan would hold what it inherited, such as a
    lock.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this could be arranged
        os._exit(1)
