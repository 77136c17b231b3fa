"""Writes files at places known beforehand, in several threads, and publishes them at once."""

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
"""Larger tensors are written by several threads, where no checksum needs their order."""

Advance = Callable[[int], None]
"""called with a number of bytes that were written"""


@dataclass(frozen=True)
class FileSlice:
    """Rows `first` to `last` of a tensor, to be written in a dtype."""

    tensor: TensorRows
    dtype: torch.dtype
    first: int
    last: int
    name: str
    """for messages"""

    @property
    def bytes(self) -> int:
        """The size once written."""
        return (self.last - self.first) * row_bytes(self.tensor.shape, self.dtype)


Content = bytes | FileSlice | Callable[[int], bytes]
"""bytes, rows of a tensor, or a function that makes the bytes after a tensor from its CRC-32"""


@dataclass(frozen=True)
class Extent:
    """A contiguous range of a file, and what is written there."""

    file: Path
    offset: int
    content: Sequence[Content]


def whole_slice(tensor: TensorRows, dtype: torch.dtype, name: str) -> FileSlice:
    """Return a tensor as one piece."""
    return FileSlice(tensor, dtype, 0, row_count(tensor.shape), name)


def split_into_extents(
    file: Path, offset: int, tensor: TensorRows, dtype: torch.dtype, name: str
) -> Iterator[Extent]:
    """Yield a tensor in pieces that several threads can write."""
    row = row_bytes(tensor.shape, dtype)
    step = max(1, PIECE_BYTES // max(1, row))
    rows = row_count(tensor.shape)
    for first in range(0, rows, step):
        piece = FileSlice(tensor, dtype, first, min(first + step, rows), name)
        yield Extent(file, offset + first * row, [piece])


def write_all(
    work: Sequence[Extent], advance: Advance, checks: Sequence[Callable[[], str]] = ()
) -> list[str]:
    """Write extents to files that exist, on all cores; return the XXH3-128 of each.

    Only the hash of a extent that is a whole file is of use.

    Args:
        checks: other work that must succeed, done beside it.
    """
    writes = [partial(_write, each, advance) for each in work]
    return run_in_threads([*checks, *writes])[len(checks) :]


def run_in_threads(work: Sequence[Callable[[], str]]) -> list[str]:
    """Do work in as many threads as there are cores; the first failure ends it all."""
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
    """Make the contents of files survive a power failure."""
    run_in_threads([partial(_sync, file) for file in files])


def _sync(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return ""


def create_file(file: Path, size: int, head: bytes = b"") -> None:
    """Make a file of a size, with its first bytes."""
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
        CheckpointError: there is no space, or writing is refused.
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
    """Lets several threads report to one listener, one at a time."""

    def __init__(self, listener: Advance) -> None:
        self._listener = listener
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Report a number of bytes."""
        with self._lock:
            self._listener(count)
