"""What processes that work for another one do first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def follow_the_parent(parent: int) -> None:
    """Die with the parent process, and leave the signals for its group to it.

    An orphan would hold what it inherited, such as a lock.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this could be arranged
        os._exit(1)
