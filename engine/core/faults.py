"""Points where a test makes a process fail or wait: `TRAINER_FAULT=checkpoint.before_rename:kill`.

The variable holds one or more faults, separated by commas. A fault is
`POINT[:rankR][:stepS][:xN]:ACTION`; with `xN` the point fails the first N times only. Actions:

* `kill` (SIGKILL), `stop` (SIGSTOP), `raise`, `full` (no space left on the device);
* `sleep` or `sleep60`: sleep ten, or so many, seconds, in Python code that a signal can interrupt;
* `hold`: wait for a file `release` in the folder `TRAINER_FAULT_MARKS`;
* `block60`: wait so many seconds in C, where Python's signal handlers do not run.

A point that is met leaves an empty file `POINT-PID` in the folder `TRAINER_FAULT_MARKS`, if that is
set. Without `TRAINER_FAULT`, `point` does nothing. Torch-free.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time

_passed: dict[str, int] = {}
"""how often each fault with `xN` has happened in this process"""


def point(name: str, rank: int = 0, step: int = 0) -> None:
    """Fail as the environment variable says, if this is the point, the rank and the step."""
    for fault in os.environ.get("TRAINER_FAULT", "").split(","):
        if not fault:
            continue
        wanted, *conditions, action = fault.split(":")
        times = [text for text in conditions if re.fullmatch(r"x\d+", text)]
        here = {f"rank{rank}", f"step{step}", *times}
        if name != wanted or not here.issuperset(conditions):
            continue
        _passed[fault] = _passed.get(fault, 0) + 1
        if not times or _passed[fault] <= int(times[0][1:]):
            if folder := os.environ.get("TRAINER_FAULT_MARKS"):
                open(os.path.join(folder, f"{name}-{os.getpid()}"), "w").close()
            _fail(action)


def _fail(action: str) -> None:
    kind, seconds = action.rstrip("0123456789"), action.lstrip("abcdefghijklmnopqrstuvwxyz")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(float(seconds or 10))
    elif kind == "hold":
        while not os.path.exists(os.path.join(os.environ["TRAINER_FAULT_MARKS"], "release")):
            time.sleep(0.02)
    elif kind == "block":
        # Other threads get the signals meanwhile, as they do while C++ works for long.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(float(seconds or 10))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    elif kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise RuntimeError(f"fault {action!r}")
