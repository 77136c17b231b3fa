"""Checks how large the pages of a Parquet column become when they are decompressed.

pyarrow decompresses a page as a whole, and the sizes in the file's footer may be wrong. The header
of a page is a struct of Thrift's compact protocol. Its fields 1 to 3 are the page's type, and its
decompressed and compressed sizes.

Source: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from typing import IO, Any

from ..core.files import open_regular

HEADER_BYTES, MAX_HEADER_BYTES, MAX_DEPTH = 2**8, 2**20, 8
# Text rarely takes less than a tenth of its size. Pages that are not larger than the first number
# are unpacked whatever they claim; none is that is larger than the second.
ANY_PAGE_BYTES, MAX_PAGE_BYTES, MAX_RATIO = 2**28, 2**30, 64


def measure_pages(path: str, row_group: Any, column: str) -> int:
    """Return the packed bytes of a column and of the fields below it, after checking their pages.

    Args:
        path: of the file.
        row_group: its metadata, by pyarrow.
        column: its path in the schema.

    Raises:
        ValueError: a page is much larger than a genuine one, or has no header.
        OSError: the file cannot be read.
    """
    total = 0
    with open_regular(path) as file:
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            if f"{chunk.path_in_schema}.".startswith(f"{column}."):
                total += _measure(file, chunk)
    return total


def _measure(file: IO[bytes], chunk: Any) -> int:
    position, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary and 0 < dictionary < position:
        position = dictionary
    end, total = position + chunk.total_compressed_size, 0
    while position < end:
        header, unpacked, packed = read_header(file, position)
        limit = min(max(MAX_RATIO * packed, ANY_PAGE_BYTES), MAX_PAGE_BYTES)
        if unpacked > limit:
            raise ValueError(
                f"a page of {packed} bytes unpacks to {unpacked}; {limit} are read: "
                "write the file again with smaller pages"
            )
        position += header + packed
        total += packed
    return total


def read_header(file: IO[bytes], position: int) -> tuple[int, int, int]:
    """Return the size of the page header at a position, and the page's, unpacked and packed.

    Raises:
        ValueError: there is none.
    """
    length = HEADER_BYTES
    while length <= MAX_HEADER_BYTES:  # statistics in it may be long
        file.seek(position)
        content = file.read(length)
        reader = _Reader(content)
        try:
            fields = reader.struct()
            unpacked, packed = fields[2], fields[3]
        except IndexError:
            if len(content) < length:
                break
            length *= 16
        except KeyError:
            break
        else:
            if unpacked < 0 or packed < 0:
                break
            return reader.at, unpacked, packed
    raise ValueError(f"no page header at byte {position}")


class _Reader:
    """Steps through Thrift's compact protocol; an IndexError says that more bytes are needed."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def byte(self) -> int:
        value = self.content[self.at]
        self.at += 1
        return value

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of the page header is too long")

    def zigzag(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Return the integers among its fields, by number."""
        if depth > MAX_DEPTH:
            raise ValueError("the page header nests too deep")
        fields, number = {}, 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            fields[number] = self.value(head & 0xF, depth)
        return fields

    def value(self, kind: int, depth: int) -> int:
        """Read a field's value; 0 stands for all that is no integer."""
        if kind in (4, 5, 6):
            return self.zigzag()
        if kind == 8:
            self.skip(self.varint())
        elif kind == 12:
            self.struct(depth + 1)
        elif kind in (3, 7):
            self.skip(1 if kind == 3 else 8)
        elif kind not in (1, 2):  # no page header holds lists or maps
            raise ValueError(f"the page header has a field of type {kind}")
        return 0

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.content):
            raise IndexError
