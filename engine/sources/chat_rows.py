"""Conversations in rows of tables: Parquet files, and datasets of the `datasets` library."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .configs import RecordSource
from .documents import DocumentFault, Record

PAIRS = (("prompt", "completion"), ("instruction", "output"))
COLUMNS = ("tools", "prompt", "completion", "instruction", "input", "output", "system")
"""the columns beside the messages that a conversation may be in"""


def select_columns(field: str, known: Collection[str]) -> dict[str, str]:
    """Return the columns of a table that a conversation is read from, each under its own name.

    Args:
        field: the column of messages.
        known: the columns of the table.

    Raises:
        ValueError: there are neither messages nor a pair of columns in their place.
    """
    columns = [name for name in (field, *COLUMNS) if name in known]
    if field not in known and not any(set(pair) <= set(columns) for pair in PAIRS):
        listed = ", ".join(sorted(known)[:10])
        others = " or ".join(" and ".join(pair) for pair in PAIRS)
        raise ValueError(f'no column "{field}", nor {others}; there is: {listed}')
    return {name: name for name in columns}


def iterate_rows(rows: RecordSource, part: Any) -> Iterator[Record | DocumentFault]:
    """Yield the rows of a part as lines of JSON have them: without the keys that are null."""
    for record in rows.read_records(part):
        if isinstance(record, Record):
            record = record._replace(values=_drop_nulls(record.values))
        yield record


def _drop_nulls(value: Any) -> Any:
    """Return a value without null keys of objects, which stand in for missing ones in a table."""
    if isinstance(value, Mapping):
        return {key: _drop_nulls(each) for key, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value
