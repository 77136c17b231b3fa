"""The run directory: its layout, and the lock that lets one run write in it. Torch-free."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from .errors import EnvironmentFault, RunInUse
from .files import atomic_write

PATIENCE_SECONDS = 0.5
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# A forked data worker must not keep the lock of a trainer that was killed.
os.register_at_fork(after_in_child=_close_in_child)


class RunDirectory:
    """One run's folder: `recipe.toml metrics.jsonl checkpoints/ logs/ tensorboard/`.

    As a context it is prepared and locked; only rank 0 enters it. The lock belongs to the process:
    the system frees it when the process ends, also by `kill -9`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of ranks other than 0."""
        return self.path / "logs"

    def __enter__(self) -> Self:
        self.prepare()
        self.lock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.unlock()

    def prepare(self) -> None:
        """Create the folders and check that files can be written.

        Raises:
            EnvironmentFault: they cannot, and why.
        """
        probe = self.path / f".probe.{os.getpid()}"
        try:
            for folder in (self.path, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            atomic_write(probe, "x" * 4096)
            probe.unlink()
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write in the run directory {self.path}: {error.strerror or error}",
                "give another folder with `--set run.dir=...`, or free space there",
            ) from error

    def lock(self) -> None:
        """Take the lock.

        Raises:
            RunInUse: another run holds it; names its process, host and start.
            EnvironmentFault: the file system has no locks.
        """
        path = self.path / ".lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                raise EnvironmentFault(
                    f"the file system of {self.path} has no file locks: {error.strerror}",
                    "give a folder on another one with `--set run.dir=...`",
                ) from error
            raise RunInUse(
                f"{self.path} is in use by {_holder(path)}",
                "stop that run, or give this one another name with `--set run.name=...`",
            ) from error
        _held.add(descriptor)
        self._lock = descriptor
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)

    def holder(self) -> str:
        """Return whose run this is, or an empty string if nobody holds the lock.

        Asks for a shared lock and gives it back at once; a run that starts in that very instant
        tries again (`PATIENCE_SECONDS`).
        """
        path = self.path / ".lock"
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return ""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(path)
        except OSError:
            return ""
        finally:
            os.close(descriptor)
        return ""

    def unlock(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._lock in _held:
            _held.remove(self._lock)
            os.close(self._lock)
        self._lock = None


def _take(descriptor: int) -> None:
    """Take a lock, giving the children of a run that was just killed a moment to end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}, started {holder['start']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
