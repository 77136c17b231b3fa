"""Several files of one column, memory-mapped as one array."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EnvironmentFault

MAP_FIXED = 0x10  # the same on Linux and macOS; the mmap module does not name it


def map_files(paths: Sequence[Path], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the files' contents end to end, read-only, without reading them.

    Args:
        paths: all but the last as long as a multiple of every machine's page size (64 KiB).
        dtype: of the elements.

    Raises:
        OSError: a file cannot be opened.
        EnvironmentFault: the address space is too small for them.
    """
    if not paths:
        return np.empty(0, dtype=dtype)
    if len(paths) == 1:
        # A plain array: slices of np.memmap run Python code each time.
        return np.asarray(np.memmap(paths[0], dtype=dtype, mode="r"))
    return np.asarray(_Region(paths, dtype))


class _Region:
    """Address space with one file behind the other; numpy reads it where it is."""

    def __init__(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        sizes = [path.stat().st_size for path in paths]
        self._size = sum(sizes)
        self._libc = _libc()
        self._address = self._reserve()
        place = self._address
        for path, size in zip(paths, sizes, strict=True):
            self._place(path, place, size)
            place += size
        self.__array_interface__ = {
            "version": 3,
            "data": (self._address, True),
            "shape": (self._size // dtype.itemsize,),
            "typestr": dtype.str,
        }

    def _reserve(self) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return self._map(None, self._size, 0, flags, -1, "address space")

    def _place(self, path: Path, place: int, size: int) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            flags = mmap.MAP_SHARED | MAP_FIXED
            self._map(place, size, mmap.PROT_READ, flags, descriptor, str(path))
        finally:
            os.close(descriptor)

    def _map(
        self, place: int | None, size: int, protection: int, flags: int, file: int, what: str
    ) -> int:
        address = self._libc.mmap(place, size, protection, flags, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            reason = os.strerror(ctypes.get_errno())
            raise EnvironmentFault(
                f"{what}: cannot map {size} bytes: {reason}",
                "raise the limit of address space (ulimit -v)",
            )
        return int(address)

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._libc.munmap(self._address, self._size)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    integer, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, integer, integer, integer, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    return libc
