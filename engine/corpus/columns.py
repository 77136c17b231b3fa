"""Writes the arrays of a token store shard by shard, and memory-maps them as one array."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from ..core.errors import EnvironmentFault
from ..core.files import open_regular, require_regular
from .manifest import TokenFileEntry, shard_name


class Column:
    """Writes an array with one value a token to files of `shard_tokens` values each.

    Args:
        folder: the folder of the store.
        name: the name of the column, which begins the file names.
        shard_tokens: the number of values in each file but the last.
    """

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self.folder = folder
        self.name = name
        self.shard_tokens = shard_tokens
        self.files: dict[str, TokenFileEntry] = {}
        self.hash = xxh3_128()
        self._file: IO[bytes] | None = None
        self._file_hash = xxh3_128()
        self._room = 0

    def write(self, values: NDArray[Any]) -> None:
        """Append values, and start a new file whenever the current one is full."""
        while len(values):
            if not self._room:
                self.end_file()
                name = shard_name(self.name, len(self.files))
                self._file = open(self.folder / name, "xb")  # noqa: SIM115  `end_file` closes it
                self._file_hash, self._room = xxh3_128(), self.shard_tokens
            head, values = values[: self._room], values[self._room :]
            self._room -= len(head)
            data = np.ascontiguousarray(head).view(np.uint8).data
            assert self._file is not None
            self._file.write(data)
            self._file_hash.update(data)
            self.hash.update(data)

    def end_file(self) -> None:
        """Sync and close the file that is being written, and record its size and checksum."""
        if self._file:
            sync(self._file)
            size = self._file.tell()
            self.files[Path(self._file.name).name] = TokenFileEntry(
                bytes=size, xxh3=self._file_hash.hexdigest()
            )
            self.close()

    def close(self) -> None:
        """Close the file without syncing it."""
        if self._file:
            self._file.close()
            self._file, self._room = None, 0


class FolderWriter:
    """Creates a folder, and closes the files that are written there however writing ends.

    Args:
        folder: the folder to create.

    Attributes:
        to_close: what closes the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.to_close = ExitStack()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.to_close.close()


def sync(file: IO[bytes]) -> None:
    """Flush a file and wait until its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


MAP_FIXED = 0x10  # the same on Linux and macOS; the mmap module does not name it


def map_files(paths: Sequence[Path], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Memory-map files as one read-only 1-D array of their concatenated contents.

    Args:
        paths: the files; the size of each but the last must be a multiple of 64 KiB, which is the
            largest page size.
        dtype: the dtype of the elements.

    Raises:
        OSError: a file cannot be opened.
        EnvironmentFault: the address space is too small for the files.
    """
    if not paths:
        return np.empty(0, dtype=dtype)
    if len(paths) == 1:
        # A plain array: slices of np.memmap run Python code each time.
        require_regular(paths[0])
        return np.asarray(np.memmap(paths[0], dtype=dtype, mode="r"))
    sizes = [path.stat().st_size for path in paths]
    try:
        # Reserve the address range first, so that the files can be mapped next to each other with
        # MAP_FIXED. The range is unmapped when the array is freed.
        room = mmap.mmap(
            -1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
        )
    except OSError as error:
        raise _cannot_map("address space", sum(sizes), error.errno) from error
    array = np.frombuffer(room, dtype)
    place, libc = array.ctypes.data, _libc()
    for path, size in zip(paths, sizes, strict=True):
        with open_regular(path) as file:
            flags = mmap.MAP_SHARED | MAP_FIXED
            if libc.mmap(place, size, mmap.PROT_READ, flags, file.fileno(), 0) != place:
                raise _cannot_map(str(path), size, ctypes.get_errno())
        place += size
    return array


def _cannot_map(what: str, size: int, reason: int | None) -> EnvironmentFault:
    return EnvironmentFault(
        f"{what}: cannot map {size} bytes: {os.strerror(reason or 0)}",
        "raise the limit of address space (ulimit -v)",
    )


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    integer, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, integer, integer, integer, ctypes.c_int64]
    return libc
