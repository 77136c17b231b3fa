"""Defines `records.json`, the index of a folder of encoded records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from ...core.config import CountOrZero, Table
from ...sources.documents import DocumentFault
from ..manifest import TokenFileEntry, read_index, require_files, verify_first_line

INDEX: Final = "records.json"


class ColumnEntry(Table):
    """One column of a record store."""

    dtype: Literal["bool", "uint8", "int32", "uint32", "int64", "float32", "float64"]
    num_values: CountOrZero
    is_ragged: bool
    """whether a sample has a 1-D array of any length, and not a scalar"""


class RecordManifest(Table):
    """`records.json`."""

    format: Literal[1]
    num_records: CountOrZero
    columns: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ColumnEntry],
        Field(max_length=64),
    ]
    fingerprint: str
    """xxh3-128 of all columns; what a resumed run must find unchanged"""
    files: dict[str, TokenFileEntry]
    skipped: CountOrZero
    """records left out because they cannot be read"""
    dropped: CountOrZero
    """records left out because they are too long"""
    truncated: CountOrZero
    """records that were cut to `data.seq_len`"""
    faults: Annotated[list[str | DocumentFault], Field(max_length=100)]

    @model_validator(mode="after")
    def _names_its_own_files(self) -> RecordManifest:
        """Refuse files that the columns do not imply, so that no other file is ever opened."""
        names = {file for name, column in self.columns.items() for file in list_files(name, column)}
        if names != self.files.keys():
            raise ValueError("files: not those of its columns")
        return self

    @property
    def all_files(self) -> dict[str, TokenFileEntry]:
        """Return the entry of every file by its name in the folder."""
        return self.files


def list_files(name: str, column: ColumnEntry) -> list[str]:
    """Return the names of the files of a column."""
    return [f"{name}.npy", f"{name}.offsets.npy"] if column.is_ragged else [f"{name}.npy"]


def read_record_manifest(folder: Path) -> RecordManifest:
    """Read `records.json` and check that every file in it exists with the recorded size.

    Raises:
        DataError: `records.json` is missing or malformed, or a file is missing or of another size.
        EnvironmentFault: `records.json` cannot be read.
    """

    def parse(file: Path, content: bytes) -> RecordManifest:
        return RecordManifest.model_validate_json(verify_first_line(file, content))

    manifest = read_index(folder / INDEX, parse)
    require_files(folder, INDEX, manifest.files)
    return manifest
