"""The process of a rank: its command line, its environment, and its end with the parent's."""

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
    """Return the command line that runs this package's CLI.

    `-P` keeps the working directory off the path, where a folder may have the name of a package.
    """
    return [sys.executable, "-P", "-m", PACKAGE, *arguments]


def make_preexec_function(command: Sequence[str]) -> Callable[[], None]:
    """Return the function that a child calls between fork and exec.

    Args:
        command: command line of the child. Our own begins with signals blocked, and unblocks them
            when it can answer.
    """
    is_ours = PACKAGE in command
    parent = os.getpid()
    # Opened before the fork: locks that other threads hold stay locked in the child, so it does as
    # little as it can.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            # The kernel sends it when the thread that forked ends, so ranks are started in the main
            # thread.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # drops what is pending
            signal.signal(number, signal.SIG_DFL)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the rank has a log to write them to
        signal.pthread_sigmask(signal.SIG_BLOCK if is_ours else signal.SIG_UNBLOCK, STOP_SIGNALS)

    return prepare


@contextmanager
def create_store_file() -> Iterator[tuple[str, Sequence[int]]]:
    """Create the file that ranks of this machine share as their store.

    On Linux the file has no name, and is gone with its last user, however that ends.

    Yields:
        the path of the file, and the descriptors that the ranks must inherit.
    """
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        file = os.memfd_create("trainer-store")
        try:
            # Each rank inherits the descriptor under this number, so the path is the same in all of
            # them.
            yield f"/proc/self/fd/{file}", [file]
        finally:
            os.close(file)
        return
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        yield str(Path(folder) / "store"), []


def rank_environment(environ: Mapping[str, str], rank: int, nproc: int) -> dict[str, str]:
    """Return the environment of one rank.

    Ranks share the cores, gloo uses the loopback interface (a laptop's address changes), and the
    package is imported from where this process imported it.
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
    # A user's variables win over our defaults. The numbers of ranks win over the user's: this
    # process may itself be a task of SLURM or a rank of torchrun.
    return {**defaults, **environ, **ranks}


def _uninstalled_folder() -> str:
    """Return the entry of `sys.path` that holds this package; empty if it is installed.

    A rank starts with `-P`, which leaves the working directory out of `sys.path`.
    """
    folder = Path(sys.modules[PACKAGE].__file__ or "").absolute().parent.parent
    on_path = any(Path(entry).absolute() == folder for entry in sys.path)
    return str(folder) if on_path and folder.name not in ("site-packages", "dist-packages") else ""
