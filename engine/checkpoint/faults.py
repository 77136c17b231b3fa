"""Points where a test can make a process fail: `TRAINER_FAULT=checkpoint.before_rename:rank0:kill`.

The variable holds `POINT[:rankR][:stepS]:ACTION`, where the action is `kill` (SIGKILL), `stop`
(SIGSTOP), `raise`, `full` (no space left on the device) or `sleep` (ten seconds). Without it,
`point` does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import time


def _armed(name: str, rank: int = 0, step: int = 0) -> None:
    """Fail as the environment variable says, if this is the point, the rank and the step."""
    wanted, *conditions, action = FAULT.split(":")
    here = {f"rank{rank}", f"step{step}"}
    if name != wanted or not here.issuperset(conditions):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "sleep":
        time.sleep(10)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise RuntimeError(f"fault {FAULT!r}")


def _unarmed(name: str, rank: int = 0, step: int = 0) -> None:
    """Do nothing."""


FAULT = os.environ.get("TRAINER_FAULT", "")
point = _armed if FAULT else _unarmed
