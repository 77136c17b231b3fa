"""Opens text files that may be compressed: gzip, bzip2, xz and Zstandard."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, BinaryIO

from ..core.files import open_regular
from ..core.registry import require_package

BUFFER_BYTES = 2**20
ZSTD_BYTES = 2**11
"""compressed bytes a step: four of them can expand to 128 KiB of text"""


def _open_zstd(file: BinaryIO) -> tuple[Any, type[Exception]]:
    zstandard = require_package("zstandard", "a .zst file", "data")
    return _ZstdFrames(file, zstandard.ZstdDecompressor()), zstandard.ZstdError


class _ZstdFrames:
    """The content of Zstandard frames; unlike the library's reader, it detects a truncated file."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None
        self._packed, self._ready = b"", memoryview(b"")

    def read(self, length: int) -> memoryview:
        """Return at most so many bytes; none at the end."""
        while not self._ready and (packed := self._packed or self._file.read(ZSTD_BYTES)):
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(packed))
            self._packed = self._frame.unused_data
        if not self._ready and self._frame is not None and not self._frame.eof:
            raise EOFError("the file is truncated")
        content, self._ready = self._ready[:length], self._ready[length:]
        return content


OPENERS: dict[str, Callable[[BinaryIO], tuple[Any, type[Exception]]]] = {
    ".gz": lambda file: (gzip.GzipFile(fileobj=file), zlib.error),
    ".bz2": lambda file: (bz2.BZ2File(file), OSError),
    ".xz": lambda file: (lzma.LZMAFile(file), lzma.LZMAError),  # noqa: SIM115 - `_Decompressed` closes it
    ".zst": _open_zstd,
}
"""suffix -> what returns a stream of the content, and its error for damaged files"""


def is_compressed(path: str | PurePath) -> bool:
    """Return whether a file's name says that it is compressed."""
    return PurePath(path).suffix in OPENERS


def plain_path(path: PurePath) -> PurePath:
    """Return a path without the suffix of compression."""
    return path.with_suffix("") if is_compressed(path) else path


def open_text(path: str, start: int = 0) -> BinaryIO:
    """Open a regular file and go to a byte; a compressed file starts at its first byte.

    Raises:
        OSError: it cannot be read; reading raises it too, also where compressed data are damaged.
        EnvironmentFault: it is a .zst file, and no package for it is installed.
    """
    file = open_regular(path)
    if not is_compressed(path):
        file.seek(start)
        return file
    try:
        stream, error = OPENERS[PurePath(path).suffix](file)
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Decompressed(file, stream, error), BUFFER_BYTES)


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, with errors that name what is wrong."""

    def __init__(self, file: BinaryIO, stream: Any, error: type[Exception]) -> None:
        super().__init__()
        self._file, self._stream, self._error = file, stream, error

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and return how many bytes were written; 0 at the end."""
        try:
            content = self._stream.read(len(buffer))
        except (EOFError, OSError, self._error) as error:
            raise OSError(errno.EIO, f"its compressed data are damaged: {error}") from error
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the file too, which the stream leaves open."""
        self._file.close()
        super().close()
