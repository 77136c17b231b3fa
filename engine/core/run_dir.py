"""The run directory: its layout, and the lock that lets one run write in it. Torch-free."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli

from .errors import EnvironmentFault, RunInUse
from .files import atomic_write, open_regular, read_regular
from .processes import is_locked, is_unsupported, lock_file, lock_folder, unlock
from .unfinished import clear_unfinished

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 0.5
"""for the children of a run that was just killed, and for `holder`"""
LARGEST_LOCK = 4096
LARGEST_RECIPE = 2**22
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # what `atomic_write` writes to
EXPORTS = ("hf", "hf-ema", "adapter")
"""what a finished run leaves for Hugging Face's libraries: weights, their average, adapters"""


class RunDirectory:
    """One run's folder: `recipe.toml metrics.jsonl checkpoints/ logs/ tensorboard/`.

    As a context it is prepared and locked; only rank 0 enters it. The lock belongs to the process:
    the system frees it when the process ends, also by `kill -9`. The folder itself is locked, so
    that deleting `.lock` frees nothing, and `.lock`, which says whose run it is: some file systems
    know no locks of folders.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: list[int] = []

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
        for why in self.clear_exports():
            log.warning("%s", why)
        # Under the lock: without it, another run could still be writing them.
        for path in self.path.glob(".*.tmp"):
            if _TEMPORARY.fullmatch(path.name):  # its writer was killed
                with suppress(OSError):
                    path.unlink()
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
            EnvironmentFault: a folder or a file cannot be written; the message says why.
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
        try:
            # The folder first: two runs that delete `.lock` and create it again still meet here.
            folder = lock_folder(self.path, PATIENCE_SECONDS)
            self._locks += [] if folder is None else [folder]
            file = lock_file(self._file, PATIENCE_SECONDS)
            self._locks.append(file)
        except BlockingIOError as error:
            self.unlock()
            raise RunInUse(
                f"{self.path} is in use by {_holder(self._file)}",
                "stop that run, or give this one another name with `--set run.name=...`",
            ) from error
        except OSError as error:
            self.unlock()
            if is_unsupported(error):
                raise EnvironmentFault(
                    f"the file system of {self.path} has no file locks: {error.strerror}",
                    "give a folder on another one with `--set run.dir=...`",
                ) from error
            # O_NOFOLLOW reports a link as "too many levels of symbolic links".
            reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise EnvironmentFault(
                f"{self._file} cannot be locked: {reason}",
                "remove it if it is no regular file, or give another folder",
            ) from error
        holder = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "start": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        # Only now that the lock is held: until then the file names the other run.
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode() + b"\n", 0)

    @property
    def _file(self) -> Path:
        return self.path / ".lock"

    def holder(self) -> str:
        """Return the holder of the run's lock, or an empty string if there is none."""
        is_held = is_locked(self._file) or is_locked(self.path)
        return _holder(self._file) if is_held else ""

    def clear_exports(self) -> list[str]:
        """Delete exports that were killed; only the holder of the lock may. Return what is left."""
        return clear_unfinished(self.path, EXPORTS)

    def unlock(self) -> None:
        """Give the locks back; nothing happens if they are not held."""
        while self._locks:
            unlock(self._locks.pop())


def _holder(path: Path) -> str:
    try:
        holder = json.loads(read_regular(path, LARGEST_LOCK))
        return f"process {holder['pid']} on {holder['host']}, started {holder['start']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the resolved recipe as plain tables; empty if it cannot be read."""
    try:
        with open_regular(path / "recipe.toml") as file:
            return tomli.loads(file.read(LARGEST_RECIPE).decode())
    except (OSError, ValueError, RecursionError):
        return {}
