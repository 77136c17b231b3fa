"""How a rank's process is made: its command line, its environment, its ties to the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .ending import STOP_SIGNALS
from .rank_log import STACKS_SIGNAL

PACKAGE = __name__.partition(".")[0]
_PR_SET_PDEATHSIG = 1


def trainer_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs this package's CLI, whatever the working directory holds.

    `-P` keeps the working directory off the path: a folder there may be called like a package.
    """
    return [sys.executable, "-P", "-m", PACKAGE, *arguments]


def preparation(command: Sequence[str]) -> Callable[[], None]:
    """Return what a child does between fork and exec.

    Args:
        command: what it becomes. Our own command line starts with signals blocked, and unblocks
            them when it can answer.
    """
    is_ours = PACKAGE in command
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # drops what is pending
            signal.signal(number, signal.SIG_DFL)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the rank has a log to write them to
        signal.pthread_sigmask(signal.SIG_BLOCK if is_ours else signal.SIG_UNBLOCK, STOP_SIGNALS)

    return prepare


@contextmanager
def store_file() -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the path of a file in which ranks of this machine meet, and descriptors for them.

    On Linux the file has no name, and is gone with its last user, however that ends.
    """
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        file = os.memfd_create("trainer-store")
        try:
            yield f"/proc/self/fd/{file}", [file]
        finally:
            os.close(file)
        return
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        yield str(Path(folder) / "store"), []


def rank_environment(environ: Mapping[str, str], rank: int, nproc: int) -> dict[str, str]:
    """Return the environment of one rank.

    Threads are shared out, gloo stays on the loopback interface (a laptop's address changes), and
    the package is found where this process found it.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    ranks = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    if folder := _uninstalled_folder():
        path = environ.get("PYTHONPATH", "")
        ranks["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [path])])
    return {**defaults, **environ, **ranks}


def _uninstalled_folder() -> str:
    """Return the path entry that this package comes from, unless every interpreter has it."""
    folder = Path(sys.modules[PACKAGE].__file__ or "").absolute().parent.parent
    on_path = any(Path(entry).absolute() == folder for entry in sys.path)
    return str(folder) if on_path and folder.name not in ("site-packages", "dist-packages") else ""
