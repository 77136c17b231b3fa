"""A file of predictions, one JSON object a line, that an interrupted command continues. Torch-free.

Beside it stands a small file that says which checkpoint, data and options made the lines: lines of
another origin are never continued.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..core.errors import EnvironmentFault, RecipeError
from ..core.files import atomic_write, open_regular, read_regular
from ..core.text.display import describe_changes

FORCE = "give another --output, or --force to begin it again"
BLOCK_BYTES = 2**20
FLUSH_SECONDS = 1.0


class PredictionFile:
    """Appends lines to a file after the last whole line of the same origin.

    Args:
        path: the file; what is no regular file, such as a pipe, is written through.
        origin: what the lines depend on, by name.
        replace: begin again whatever is there.

    Raises:
        RecipeError: the file is there and has another origin.
        EnvironmentFault: it cannot be written, or another process writes it.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any], *, replace: bool = False) -> None:
        self.path = path
        self.num_lines = 0
        """lines that were there already"""
        self._flushed = time.monotonic()
        try:
            self._is_regular = not path.exists() or path.is_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open(origin, replace=replace)
        except OSError as error:
            raise self._fault(error) from error

    def _open(self, origin: Mapping[str, Any], *, replace: bool) -> BinaryIO:
        if not self._is_regular:
            return open(os.open(self.path, os.O_WRONLY | os.O_NOCTTY), "wb")
        sidecar = self.path.with_name(f"{self.path.name}.origin.json")
        if self.path.exists() and not replace:
            self._require_same(sidecar, origin)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        file = open(descriptor, "r+b")  # noqa: SIM115 # closed by `close`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            message = f"another process writes {self.path}"
            raise EnvironmentFault(message, "give another --output") from None
        if replace:
            file.truncate(0)
        # An empty file has no lines of another origin, so that a kill in between does no harm.
        if not (stop := _find_last_line_end(file)):
            text = json.dumps(dict(origin), indent=2, default=str)
            atomic_write(sidecar, text + "\n")
        file.truncate(stop)
        self.num_lines = _count_lines(file)
        return file

    def _require_same(self, sidecar: Path, origin: Mapping[str, Any]) -> None:
        """Raise a RecipeError if the lines of the file are of another origin."""
        with open_regular(self.path) as file:
            if not os.fstat(file.fileno()).st_size:
                return
        try:
            known = json.loads(read_regular(sidecar))
        except (OSError, ValueError, RecursionError):
            known = None
        if not isinstance(known, dict):
            message = f"{self.path} is there already, and {sidecar.name} does not say of what"
            raise RecipeError(message, FORCE)
        wanted = json.loads(json.dumps(dict(origin), default=str))
        if changes := describe_changes(known, wanted):
            raise RecipeError(f"{self.path} holds predictions of another origin: {changes}", FORCE)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            EnvironmentFault: the disk is full.
        """
        try:
            self._file.write(encode_line(row).encode())
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Make all lines durable.

        Raises:
            EnvironmentFault: the disk is full.
        """
        try:
            self._file.flush()
            if self._is_regular:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(f"{self.path} cannot be written: {error.strerror}")


def encode_line(row: Mapping[str, Any]) -> str:
    """Return a prediction as a line of JSON."""
    return json.dumps(row, default=str, allow_nan=False) + "\n"


def _find_last_line_end(file: BinaryIO) -> int:
    """Return the number of bytes up to the end of the last whole line."""
    stop = file.seek(0, os.SEEK_END)
    while stop > 0:
        start = max(stop - BLOCK_BYTES, 0)
        file.seek(start)
        if (found := file.read(stop - start).rfind(b"\n")) >= 0:
            return start + found + 1
        stop = start
    return 0


def _count_lines(file: BinaryIO) -> int:
    """Return the number of lines, and leave the file at the end."""
    count = 0
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        count += block.count(b"\n")
    return count
