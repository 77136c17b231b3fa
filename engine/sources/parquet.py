"""Reads documents from a text column of Parquet files, and from Arrow arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from ..core.errors import nearest
from ..core.files import require_regular
from ..core.registry import require_package
from .configs import FileSource, sources
from .documents import PART_BYTES, Document, DocumentFault
from .files import MAX_DOCUMENT_BYTES, find_files
from .parquet_pages import measure_pages

# Bytes and rows that are decompressed at once: a few bytes of a file may repeat a large value.
BATCH_BYTES, BATCH_ROWS = 2**28, 16
# Limits on the text of a row group: a fixed part, and a part for each byte of the compressed pages.
# Repeated values take almost no room in the file, so a hostile file could hold endless text.
TEXT_BESIDE, TEXT_A_BYTE = 2**30, 1000


class RowGroups(NamedTuple):
    """Consecutive row groups of a file; `stop` is 0 if the file could not be opened."""

    file: str
    start: int = 0
    stop: int = 0
    first_row: int = 0


@sources.register
class ParquetSource(FileSource):
    """A column of text in Parquet files, one document a row (extra `[data]`)."""

    name: Literal["parquet"] = "parquet"
    field: str = "text"
    """the column that holds the text; dots lead into structs"""
    suffix: ClassVar[str] = ".parquet"

    def parts(self) -> Sequence[Any]:
        """Return runs of row groups that hold about 16 MB of the column."""
        parts: list[RowGroups] = []
        for path in find_files(self.path, self.suffix):
            opened = _open(path)
            if isinstance(opened, str):
                parts.append(RowGroups(str(path)))
                continue
            with opened as file:
                metadata = file.metadata
                start = row = first_row = size = 0
                for group in range(metadata.num_row_groups):
                    row += metadata.row_group(group).num_rows
                    size += _count_column_bytes(metadata.row_group(group), self.field)
                    if size >= PART_BYTES or group + 1 == metadata.num_row_groups:
                        parts.append(RowGroups(str(path), start, group + 1, first_row))
                        start, first_row, size = group + 1, row, 0
        return parts

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a row."""
        return self.read_from(part, 0)

    def read_from(self, part: Any, first: int) -> Iterator[Document]:
        """Yield one document a row, from row `first` of the part on.

        Row groups before that row are not read. A row that cannot be read gives a fault, so that
        documents keep the numbers of their rows. A file that cannot be opened gives one fault.
        """
        opened = _open(Path(part.file))
        if isinstance(opened, str):
            if not first:
                yield DocumentFault(part.file, opened)
            return
        with opened as file:
            row = part.first_row
            first += row
            for group in range(part.start, part.stop or file.num_row_groups):
                end = row + file.metadata.row_group(group).num_rows
                if end > first:
                    skipped = max(first - row, 0)
                    yield from _read_group(file, group, self.field, row, skipped, part.file)
                row = end

    def settings(self) -> str:
        """Return the field."""
        return f" {self.field}"


def _read_group(
    file: Any, group: int, column: str, row: int, skipped: int, name: str
) -> Iterator[Document]:
    metadata = file.metadata.row_group(group)
    end = row + metadata.num_rows
    try:
        _check_column(file.schema_arrow, column)
        left = TEXT_BESIDE + TEXT_A_BYTE * measure_pages(name, metadata, column)
        largest = max(_count_column_bytes(metadata, column), 1)  # one value may be all of them
        rows = min(max(BATCH_BYTES // largest, 1), BATCH_ROWS)
        batches = file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False)
        for batch in batches:
            values = select_column(batch, column)
            unread = values.slice(skipped)
            row += len(values) - len(unread)
            skipped -= len(values) - len(unread)
            if (left := left - _count_text_bytes(unread)) < 0:
                raise ValueError("its row group repeats its values: too much text for its size")
            for document in read_texts(unread, column, name, row):
                yield document
                row += 1
        if row < end:  # a damaged page may say that it holds fewer
            raise ValueError(f"its row group has {end - row} rows less than the file says")
    except (ValueError, OSError) as error:  # pyarrow's own derive from these
        reason = summarize_error(error)
        for number in range(row + skipped, end):
            yield DocumentFault(f"{name}, row {number + 1}", reason)


def read_texts(values: Any, field: str, name: str, row: int) -> Iterator[Document]:
    """Yield the text of each value of an Arrow array, or a fault if it is null or invalid.

    Args:
        values: an Arrow array of strings or of bytes in UTF-8.
        field: the name of the column in messages.
        name: the name of the file or dataset in messages.
        row: the row number of the first value, from 0.

    Raises:
        ValueError: the array has another type.
    """
    import pyarrow as pa

    kind = values.type
    if is_dictionary := pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in _list_text_types():
        raise ValueError(f'"{field}" is {kind}, expected strings')
    for number, value in enumerate(values, row + 1):
        value = value.value if is_dictionary else value
        try:
            if not value.is_valid:
                raise ValueError(f'"{field}" is null, expected a string')
            content = value.as_buffer()
            if content.size > MAX_DOCUMENT_BYTES:
                raise ValueError(f'"{field}" is larger than {MAX_DOCUMENT_BYTES >> 20} MiB')
            yield str(content, "utf-8")
        except ValueError as error:
            yield DocumentFault(f"{name}, row {number}", str(error))


@lru_cache
def _list_text_types() -> set[Any]:
    import pyarrow as pa

    names = ["null", "string", "large_string", "binary", "large_binary"]
    names += ["string_view", "binary_view"]  # not in pyarrow 15
    return {getattr(pa, name)() for name in names if hasattr(pa, name)}


def summarize_error(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _open(path: Path) -> Any | str:
    """Open a Parquet file, or return a sentence with the reason why it cannot be opened."""
    try:
        require_regular(path)
        parquet = require_package("pyarrow.parquet", 'the "parquet" source', "data")
        # Read in small pieces: a row group may be larger than the memory.
        return parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    except (ValueError, OSError) as error:
        return f"not a Parquet file: {summarize_error(error)}"


def _check_column(schema: Any, field: str) -> None:
    """Check that a schema has a column, or a struct field with this dotted path.

    Raises:
        ValueError: the schema has neither.
    """
    if field in schema.names:
        return
    known = list(schema.names)
    kind: Any = None
    for name in field.split("."):
        if name not in known:
            has = ", ".join(sorted(known)[:10]) or "no fields"
            hint = nearest(name, known)
            raise ValueError(
                (f'no field "{field}"; there is: {has}' + (f"; {hint}" if hint else ""))[:300]
            )
        kind = schema.field(name).type if kind is None else kind.field(name).type
        known = [kind.field(index).name for index in range(kind.num_fields)]


def select_column(rows: Any, column: str) -> Any:
    """Return a column of an Arrow table or batch, or a struct field by its dotted path."""
    if column in rows.schema.names:
        return rows.column(column)
    import pyarrow.compute as pc

    first, *more = column.split(".")
    return pc.struct_field(rows.column(first), more)


def _count_column_bytes(row_group: Any, column: str) -> int:
    """Return the decompressed size of a column, or of the row group if no column has the name."""
    for index in range(row_group.num_columns):
        if row_group.column(index).path_in_schema == column:
            return int(row_group.column(index).total_uncompressed_size)
    return int(row_group.total_byte_size)


def _count_text_bytes(values: Any) -> int:
    """Return the bytes of text in an Arrow array, with dictionary values counted at each use."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(values.type) or values.type.value_type not in _list_text_types():
        return int(values.nbytes)
    lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
    return pc.sum(lengths).as_py() or 0
