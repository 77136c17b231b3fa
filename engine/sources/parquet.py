"""Reads documents and records from columns of Parquet files, and from Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ..core.files import require_regular
from ..core.registry import require_package
from .configs import FileSource, RecordSource, sources
from .documents import PART_BYTES, Document, DocumentFault, Record, describe_missing_column
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
class ParquetSource(RecordSource, FileSource):
    """Columns of Parquet files, one document or record a row (extra `[data]`)."""

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
                    size += _count_column_bytes(metadata.row_group(group), self.text_column)
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

        def read_column(batch: Any, row: int) -> Iterator[Document]:
            return read_texts(
                select_column(batch, self.text_column), self.text_column, part.file, row
            )

        return _read_part(part, lambda _: {"text": self.text_column}, read_column, first)

    def read_records(self, part: Any) -> Iterator[Record | DocumentFault]:
        """Yield one record a row."""

        def read_columns(batch: Any, row: int) -> Iterator[Record | DocumentFault]:
            columns = self.columns_among(batch.schema.names)
            return read_rows(batch, columns, part.file, row)

        return _read_part(part, self.columns_among, read_columns)

    def settings(self) -> str:
        """Return the columns that are read."""
        return f" {self.describe_columns()}"


Item = TypeVar("Item")
ReadBatch = Callable[[Any, int], Iterator[Item | DocumentFault]]
"""reads the rows of an Arrow batch, of which the first has a given number in the file"""
SelectColumns = Callable[[Collection[str]], Mapping[str, str]]
"""maps the columns of a file to the column of each field that is read, or raises ValueError"""


def _read_part(
    part: RowGroups, select: SelectColumns, read: ReadBatch[Item], first: int = 0
) -> Iterator[Item | DocumentFault]:
    """Yield what each row of a part holds, from row `first` of the part on, or a fault."""
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
                yield from _read_group(file, group, select, row, max(first - row, 0), part, read)
            row = end


def _read_group(
    file: Any,
    group: int,
    select: SelectColumns,
    row: int,
    skipped: int,
    part: RowGroups,
    read: ReadBatch[Item],
) -> Iterator[Item | DocumentFault]:
    metadata = file.metadata.row_group(group)
    end = row + metadata.num_rows
    name = part.file
    try:
        columns = select(file.schema_arrow.names)
        wanted = [column for column in columns.values() if column]
        for field, column in columns.items():
            if column:
                _check_column(file.schema_arrow, column, field)
        pages = sum(measure_pages(name, metadata, column) for column in wanted)
        left = TEXT_BESIDE + TEXT_A_BYTE * pages
        # One value may be all of a column.
        largest = max(sum(_count_column_bytes(metadata, column) for column in wanted), 1)
        rows = min(max(BATCH_BYTES // largest, 1), BATCH_ROWS)
        batches = file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False)
        for batch in batches:
            unread = batch.slice(skipped)
            row += len(batch) - len(unread)
            skipped -= len(batch) - len(unread)
            size = sum(_count_text_bytes(select_column(unread, column)) for column in wanted)
            if (left := left - size) < 0:
                raise ValueError("its row group repeats its values: too much text for its size")
            for item in read(unread, row):
                yield item
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


def read_rows(
    batch: Any, columns: Mapping[str, str], name: str, row: int
) -> Iterator[Record | DocumentFault]:
    """Yield a record for each row of an Arrow table or batch, or a fault if it cannot be read.

    Args:
        batch: the rows.
        columns: the column of each field; a field whose column is "" is left out.
        name: the name of the file or dataset in messages.
        row: the row number of the first row, from 0.
    """
    arrays = {field: select_column(batch, column) for field, column in columns.items() if column}
    for number in range(len(batch)):
        place = f"{name}, row {row + number + 1}"
        try:
            for field, array in arrays.items():
                if _count_text_bytes(array.slice(number, 1)) > MAX_DOCUMENT_BYTES:
                    limit = MAX_DOCUMENT_BYTES >> 20
                    raise ValueError(f'"{columns[field]}" is larger than {limit} MiB')
            values = {field: array[number].as_py() for field, array in arrays.items()}
        except ValueError as error:  # text that is not UTF-8, too
            yield DocumentFault(place, summarize_error(error))
        else:
            yield Record(values, place)


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


def _check_column(schema: Any, column: str, field: str) -> None:
    """Check that a schema has a column, or a struct field with this dotted path.

    Raises:
        ValueError: the schema has neither.
    """
    if column in schema.names:
        return
    known = list(schema.names)
    kind: Any = None
    for name in column.split("."):
        if name not in known:
            raise ValueError(describe_missing_column(column, field, known))
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
