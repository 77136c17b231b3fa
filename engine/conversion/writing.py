"""Writes files in several threads, at offsets that are known in advance, and publishes them."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from ..checkpoint.commit import explain_write_errors
from ..checkpoint.tensors import TensorRows, as_bytes, read_blocks, row_bytes, row_count
from ..core.unfinished import Unfinished

PIECE_BYTES = 2**26
"""larger tensors are split into extents of about this size, which several threads write"""

Advance = Callable[[int], None]
"""is called with the number of bytes that were written since the last call"""


@dataclass(frozen=True)
class FileSlice:
    """Rows of a tensor that are written in a dtype.

    Attributes:
        tensor: the tensor to read.
        dtype: the dtype in the file.
        first: index of the first row.
        last: index after the last row.
        name: the tensor's name in messages.
    """

    tensor: TensorRows
    dtype: torch.dtype
    first: int
    last: int
    name: str

    @property
    def bytes(self) -> int:
        """The size of the rows in the file, in bytes."""
        return (self.last - self.first) * row_bytes(self.tensor.shape, self.dtype)


Content = bytes | FileSlice | Callable[[int], bytes]
"""bytes, rows of a tensor, or a function from the CRC-32 of the rows before it to bytes"""


@dataclass(frozen=True)
class Extent:
    """A contiguous range of a file and its content.

    Attributes:
        file: an existing file.
        offset: position of the first byte in the file.
        content: pieces that are written one after the other.
    """

    file: Path
    offset: int
    content: Sequence[Content]


def whole_slice(tensor: TensorRows, dtype: torch.dtype, name: str) -> FileSlice:
    """Return a slice of all rows of a tensor."""
    return FileSlice(tensor, dtype, 0, row_count(tensor.shape), name)


def split_into_extents(
    file: Path, offset: int, tensor: TensorRows, dtype: torch.dtype, name: str
) -> Iterator[Extent]:
    """Split a tensor into extents of about `PIECE_BYTES`, which several threads can write.

    Args:
        file: the file to write to.
        offset: position in the file of the tensor's first byte.
        tensor: the tensor to write.
        dtype: the dtype in the file.
        name: the tensor's name in messages.
    """
    row = row_bytes(tensor.shape, dtype)
    step = max(1, PIECE_BYTES // max(1, row))
    rows = row_count(tensor.shape)
    for first in range(0, rows, step):
        piece = FileSlice(tensor, dtype, first, min(first + step, rows), name)
        yield Extent(file, offset + first * row, [piece])


def write_all(
    work: Sequence[Extent], advance: Advance, checks: Sequence[Callable[[], str]] = ()
) -> list[str]:
    """Write extents to existing files with several threads.

    Args:
        work: the extents.
        advance: called with the size of each block after it was written.
        checks: functions that run beside the writes and raise if the source is damaged.

    Returns:
        The XXH3-128 of each extent; it is the hash of a file if the extent covers the whole file.
    """
    writes = [partial(_write, each, advance) for each in work]
    return run_in_threads([*checks, *writes])[len(checks) :]


def run_in_threads(work: Sequence[Callable[[], str]]) -> list[str]:
    """Call functions in up to 8 threads and return their results in order.

    After the first error no further function starts, and the error is raised.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "convert") as pool:
        running = [pool.submit(each) for each in work]
        try:
            return [each.result() for each in running]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write(extent: Extent, advance: Advance) -> str:
    digest, position, checksum = xxhash.xxh3_128(), extent.offset, 0
    needs_checksum = any(map(callable, extent.content))
    descriptor = os.open(extent.file, os.O_WRONLY)
    try:
        for content in extent.content:
            if callable(content):
                content, checksum = content(checksum), 0
            for block in [content] if isinstance(content, bytes) else _blocks(content):
                digest.update(block)
                if needs_checksum and isinstance(content, FileSlice):
                    checksum = zlib.crc32(block, checksum)
                position = _write_at(descriptor, position, memoryview(block))
                advance(len(block))
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _blocks(piece: FileSlice) -> Iterator[memoryview]:
    for block in read_blocks(piece.tensor, piece.dtype, piece.first, piece.last, piece.name):
        yield as_bytes(block)


def _write_at(descriptor: int, position: int, block: memoryview) -> int:
    while block:
        count = os.pwrite(descriptor, block, position)
        block, position = block[count:], position + count
    return position


def sync(files: Sequence[Path]) -> None:
    """Call fsync on files, so that their contents survive a power failure."""
    run_in_threads([partial(_sync, file) for file in files])


def _sync(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return ""


def create_file(file: Path, size: int, head: bytes = b"") -> None:
    """Create a file of `size` bytes that begins with `head`; the rest is a hole until written."""
    with open(file, "xb") as opened:
        opened.write(head)
        opened.truncate(size)


@contextmanager
def publish_when_complete(target: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary path to write to; it is renamed to the target if the block succeeds.

    Args:
        target: path of a file or folder that must not exist yet.
        needed: number of bytes that will be written.

    Raises:
        RecipeError: the target exists.
        CheckpointError: the disk is full or the path cannot be written.
    """
    unfinished = Unfinished(target)
    try:
        with explain_write_errors(target.parent, needed):
            yield unfinished.path
            unfinished.publish()
    except BaseException:
        unfinished.discard()
        raise


class Counter:
    """Calls a listener from several threads, one call at a time.

    Args:
        listener: called with a number of bytes; it need not be thread-safe.
    """

    def __init__(self, listener: Advance) -> None:
        self._listener = listener
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Pass a number of written bytes to the listener."""
        with self._lock:
            self._listener(count)
