"""Checks the decompressed sizes of the pages of a Parquet column before pyarrow reads them.

pyarrow decompresses a page as a whole, and the sizes in the footer may be wrong, so a hostile page
could fill the memory. The header of a page is a struct in Thrift's compact protocol, whose fields
1 to 3 are the type, the decompressed size and the compressed size of the page.

Source: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from typing import IO, Any

from ..core.files import open_regular

HEADER_BYTES, MAX_HEADER_BYTES, MAX_DEPTH = 2**8, 2**20, 8
# Text rarely compresses below a tenth of its size. A page up to ANY_PAGE_BYTES is decompressed at
# any ratio, a larger one up to MAX_RATIO, and no page above MAX_PAGE_BYTES.
ANY_PAGE_BYTES, MAX_PAGE_BYTES, MAX_RATIO = 2**28, 2**30, 64


def measure_pages(path: str, row_group: Any, column: str) -> int:
    """Check the pages of a column and of its nested fields, and return their compressed bytes.

    Args:
        path: the path of the file.
        row_group: pyarrow's metadata of the row group.
        column: the path of the column in the schema.

    Raises:
        ValueError: a page decompresses to more than the limit, or has no valid header.
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
    """Read the page header at a position of a file.

    Returns:
        The bytes of the header, of the decompressed page and of the compressed page.

    Raises:
        ValueError: there is no valid page header.
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
    """Parses Thrift's compact protocol; raises IndexError if the content ends too early.

    Args:
        content: the beginning of the encoded struct.
    """

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
        """Parse a struct and return its fields by number; see `value`."""
        if depth > MAX_DEPTH:
            raise ValueError("the page header nests too deep")
        fields, number = {}, 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            fields[number] = self.value(head & 0xF, depth)
        return fields

    def value(self, kind: int, depth: int) -> int:
        """Parse a field's value and return it if it is an integer, else 0."""
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
