"""Documents, and the parts of files that processes read side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..core.files import open_regular
from ..core.text.display import make_printable
from ..tokenizers.tokenizer import MaskedDocument


@dataclass(frozen=True)
class DocumentFault:
    """The place of a document that cannot be read, and the reason, both printable.

    Args:
        file: the file, or another name that users know.
        reason: what is wrong with the document.
        line: the number of the line, from 1, counted from byte `start` of the file on; 0: none.
        start: the byte at which a line of the file begins.
    """

    file: str
    reason: str
    line: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        """Escape control characters of the file's name and of the document's text."""
        object.__setattr__(self, "file", make_printable(self.file))
        object.__setattr__(self, "reason", make_printable(self.reason))

    @property
    def place(self) -> str:
        """Return `file:line`; the lines before `start` are counted now."""
        line = self.line and count_lines_before(self.file, self.start) + self.line
        return f"{self.file}:{line}" if line else self.file

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


Document = str | MaskedDocument | DocumentFault


def text_of(document: str | MaskedDocument) -> str:
    """Return the text of a document, with or without loss ranges."""
    return document.text if isinstance(document, MaskedDocument) else document


# The size of a part, which is tokenised at once and lost when its process is killed.
PART_BYTES, PART_FILES = 2**24, 2**14


class ByteSpan(NamedTuple):
    """Bytes of a file that begin and end with a line."""

    file: str
    start: int
    stop: int


Part = tuple[ByteSpan, ...]


def split_files(files: Iterable[Path], length: int) -> list[Part]:
    """Return runs of files; of those larger than `length` bytes, pieces that end with a line."""
    parts: list[Part] = []
    part: list[ByteSpan] = []
    total = 0
    for span in _spans(files, length):
        part.append(span)
        total += span.stop - span.start
        if total >= PART_BYTES or len(part) >= PART_FILES:
            parts.append(tuple(part))
            part, total = [], 0
    return [*parts, tuple(part)] if part else parts


def _spans(files: Iterable[Path], length: int) -> Iterator[ByteSpan]:
    for path in files:
        start = size = 0
        with suppress(OSError), open_regular(path) as file:  # its reader says where and why
            size = os.fstat(file.fileno()).st_size
            while start + length < size:
                file.seek(start + length)
                stop = start + length + skip_line(file)
                yield ByteSpan(str(path), start, stop)
                start = stop
        if start < size or not start:
            yield ByteSpan(str(path), start, size)


def skip_line(file: BinaryIO) -> int:
    """Read to the end of the line, and return how many bytes were read."""
    skipped = 0
    while chunk := file.readline(2**20):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


@lru_cache(maxsize=64)
def count_lines_before(path: str, start: int) -> int:
    """Count the lines of a file before a byte."""
    lines = 0
    with suppress(OSError), open_regular(path) as file:
        while block := file.read(min(2**24, start - file.tell())):
            lines += block.count(b"\n")
    return lines
