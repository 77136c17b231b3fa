"""Defines documents and records, and splits files into parts that processes read in parallel."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..core.errors import nearest
from ..core.files import open_regular
from ..core.text.display import make_printable
from ..tokenizers.tokenizer import MaskedDocument
from .compressed import is_compressed


@dataclass(frozen=True)
class DocumentFault:
    """A document that cannot be read: its place and the reason, with control characters escaped.

    Args:
        file: the path of the file, or another name that users know.
        reason: the reason why the document cannot be read.
        line: the number of the line, where line 1 begins at byte `start`; 0 if there is no line.
        start: the byte offset at which line 1 begins.
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
        """The place as `file:line`, with the line number from the beginning of the file.

        The lines before `start` are counted only here, because few faults are ever shown.
        """
        line = self.line and count_lines_before(self.file, self.start) + self.line
        return f"{self.file}:{line}" if line else self.file

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


Document = str | MaskedDocument | DocumentFault


class Record(NamedTuple):
    """A sample with named fields, and where it is.

    Attributes:
        values: the value of each field, as JSON has it: text, numbers, lists and mappings.
        file: the path of the file, or another name that users know.
        line: the number of the line, where line 1 begins at byte `start`; 0 if there is no line.
        start: the byte offset at which line 1 begins.
    """

    values: dict[str, Any]
    file: str
    line: int = 0
    start: int = 0

    def make_fault(self, reason: str) -> DocumentFault:
        """Return a fault at the place of this record."""
        return DocumentFault(self.file, reason, self.line, self.start)


def select_fields(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a task's fields.

    Args:
        values: the value of each column.
        columns: the column of each field, whose dots may lead into objects; a field whose column is
            "" is left out.

    Raises:
        ValueError: there is no such column.
    """
    return {
        field: _find_column(values, column, field) for field, column in columns.items() if column
    }


def _find_column(values: Mapping[str, Any], column: str, field: str) -> Any:
    if column in values:
        return values[column]
    found: Any = values
    for name in column.split("."):
        known = found if isinstance(found, Mapping) else ()
        if name not in known:
            raise ValueError(describe_missing_column(column, field, known))
        found = found[name]
    return found


def describe_missing_column(column: str, field: str, known: Collection[str]) -> str:
    """Return the reason of a fault: a column is missing, what there is, and how to name another.

    Args:
        column: the name of the column.
        field: the field of the task that it holds.
        known: the columns that there are.
    """
    listed = ", ".join(sorted(known)[:10]) or "no fields"
    hint = (
        nearest(column.rpartition(".")[2], known) or f'fields = {{ {field} = "..." }} names another'
    )
    return f'no field "{column}"; there is: {listed[:200]}; {hint}'


def text_of(document: str | MaskedDocument) -> str:
    """Return the text of a plain or masked document."""
    return document.text if isinstance(document, MaskedDocument) else document


# Largest bytes and files of a part. A worker tokenises a part as a unit, and its work on the part
# is lost if it is killed.
PART_BYTES, PART_FILES = 2**24, 2**14


class ByteSpan(NamedTuple):
    """A range of bytes of a file that holds whole lines."""

    file: str
    start: int
    stop: int


Part = tuple[ByteSpan, ...]


def split_files(files: Iterable[Path], length: int) -> list[Part]:
    """Group files into parts, and split large files at line ends.

    Args:
        files: the files in order.
        length: the size in bytes above which a file is split.
    """
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
        with suppress(OSError), open_regular(path) as file:  # the reader reports the error
            size = os.fstat(file.fileno()).st_size
            # Compressed data can only be read from the beginning.
            while start + length < size and not is_compressed(path):
                file.seek(start + length)
                stop = start + length + skip_line(file)
                yield ByteSpan(str(path), start, stop)
                start = stop
        if start < size or not start:
            yield ByteSpan(str(path), start, size)


def skip_line(file: BinaryIO) -> int:
    """Read to the end of the current line and return the number of bytes read."""
    skipped = 0
    while chunk := file.readline(2**20):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


@lru_cache(maxsize=64)
def count_lines_before(path: str, start: int) -> int:
    """Return the number of line ends in the first `start` bytes of a file."""
    lines = 0
    with suppress(OSError), open_regular(path) as file:
        while block := file.read(min(2**24, start - file.tell())):
            lines += block.count(b"\n")
    return lines
