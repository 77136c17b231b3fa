"""Outputs of a frozen model on disk: an array a column, with a row for each sample of a split.

The arrays lie in files of at most some hundred MiB, one after the other, and are memory-mapped. The
index is written last. A writer that was interrupted continues where it last synced.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from ..core.config import Count, CountOrZero, Table
from ..core.errors import DataError
from ..core.files import atomic_write, publish, read_regular, sync_folder
from .cache import discard_other_inputs, unfinished_folder
from .checksums import Share, require_intact
from .columns import map_files, sync
from .manifest import (
    PAGE_TOKENS,
    TokenFileEntry,
    hash_file,
    read_index,
    require_files,
    serialize_manifest,
    shard_name,
    verify_first_line,
)

INDEX: Final = "outputs.json"
PROGRESS: Final = "progress.json"
FILE_BYTES = 2**28
SYNC_SECONDS = 10.0
ITEM_BYTES = 4
AGAIN = "make the outputs again: `trainer precompute RECIPE --force`"

Arrays = Mapping[str, NDArray[Any]]
"""the rows of some samples by column"""


class OutputColumn(Table):
    """One column of a store."""

    dtype: Literal["int32", "float32"]
    shape: Annotated[list[Count], Field(max_length=8)]
    """of a sample"""

    @property
    def row_bytes(self) -> int:
        """The bytes of a sample."""
        return ITEM_BYTES * math.prod(self.shape)


Columns = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], OutputColumn],
    Field(min_length=1, max_length=16),
]


class OutputManifest(Table):
    """`outputs.json`."""

    format: Literal[1]
    origin: dict[str, Any]
    """what the outputs were made from, by key of the recipe"""
    num_samples: Count
    file_samples: Count
    """samples a file; the last one of a column has fewer"""
    columns: Columns
    files: Annotated[dict[str, TokenFileEntry], Field(max_length=2**20)]

    @model_validator(mode="after")
    def _names_its_own_files(self) -> OutputManifest:
        """Refuse files that the counts do not imply, so that no other file is ever opened."""
        count = -(-self.num_samples // self.file_samples)
        if len(self.files) != count * len(self.columns):
            raise ValueError(f"files: not those of {self.num_samples} samples")
        for name, column in self.columns.items():
            # Files are mapped end to end, which whole pages alone allow.
            if count > 1 and self.file_samples * column.row_bytes % PAGE_TOKENS:
                raise ValueError(f"file_samples: files of {name} are no whole pages")
            for number in range(count):
                rows = min(self.num_samples - number * self.file_samples, self.file_samples)
                entry = self.files.get(shard_name(name, number))
                if entry is None or entry.bytes != rows * column.row_bytes:
                    raise ValueError(f"files: not those of {self.num_samples} samples")
        return self


class OutputProgress(Table):
    """`progress.json`: what an unfinished store holds for good."""

    num_samples: CountOrZero
    file_samples: Count
    columns: Columns
    files: dict[str, TokenFileEntry]


@dataclass(frozen=True)
class OutputStore:
    """The outputs of a frozen model for the samples of a split, memory-mapped.

    Attributes:
        manifest: counts, checksums and the origin.
        columns: the columns by name, [num_samples, ...] each.
    """

    manifest: OutputManifest
    columns: Arrays

    @staticmethod
    def open_folder(folder: Path, cache: Path, share: Share) -> OutputStore:
        """Memory-map a folder written by `OutputWriter`, and verify its checksums once.

        Args:
            folder: the folder of the store.
            cache: where it is noted that files were verified, if the folder is read-only.
            share: the processes that divide the comparison of files with their checksums.

        Raises:
            DataError: the folder is missing, incomplete or damaged.
            EnvironmentFault: a file cannot be read.
        """
        try:
            manifest = read_output_manifest(folder)
            require_files(folder, INDEX, manifest.files)
            require_intact(folder, cache, share, manifest.files)
        except DataError as error:
            raise DataError(error.message, AGAIN) from error
        columns = {}
        for name, column in manifest.columns.items():
            count = -(-manifest.num_samples // manifest.file_samples)
            files = [folder / shard_name(name, number) for number in range(count)]
            values = map_files(files, np.dtype(column.dtype))
            columns[name] = values.reshape(manifest.num_samples, *column.shape)
        return OutputStore(manifest, columns)

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return a copy of the rows of these samples, [B, ...] for each column."""
        return {name: column[samples] for name, column in self.columns.items()}


def read_output_manifest(folder: Path) -> OutputManifest:
    """Read `outputs.json`.

    Raises:
        DataError: it is missing or malformed.
        EnvironmentFault: it cannot be read.
    """

    def parse(file: Path, content: bytes) -> OutputManifest:
        return OutputManifest.model_validate_json(verify_first_line(file, content))

    return read_index(folder / INDEX, parse)


class OutputWriter:
    """Writes a store in the order of its samples; complete once `finish` has returned.

    Args:
        folder: the folder of the store, which does not exist; work is done beside it.
        origin: what the outputs are made from; unfinished work of another origin is deleted.
        num_samples: how many samples there are.
    """

    def __init__(self, folder: Path, origin: Mapping[str, Any], num_samples: int) -> None:
        self._folder, self._work = folder, unfinished_folder(folder)
        self._origin, self._num_samples = dict(origin), num_samples
        inputs = json.dumps([self._origin, num_samples], sort_keys=True)
        discard_other_inputs(self._work, inputs)
        known = _read_progress(self._work)
        self.num_done = known.num_samples if known else 0
        """samples that are written"""
        self._file_samples = known.file_samples if known else 0
        self._columns = dict(known.columns) if known else {}
        self._entries = dict(known.files) if known else {}
        self._files: dict[str, IO[bytes]] = {}
        self._synced = time.monotonic()

    def write(self, arrays: Arrays) -> None:
        """Append the rows of the next samples.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        if not self._columns:
            self._begin(arrays)
        left = len(next(iter(arrays.values())))
        start = 0
        while left:
            self._files = self._files or self._open_files()
            count = min(left, self._file_samples - self.num_done % self._file_samples)
            for name, array in arrays.items():
                rows = array[start : start + count].astype(self._columns[name].dtype)
                self._files[name].write(np.ascontiguousarray(rows).data)
            self.num_done, start, left = self.num_done + count, start + count, left - count
            if not self.num_done % self._file_samples:
                self._end_files()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def _begin(self, arrays: Arrays) -> None:
        """Settle the columns, and how many samples make a file of whole pages."""
        for name, array in arrays.items():
            dtype: Any = "int32" if array.dtype.kind == "i" else "float32"
            self._columns[name] = OutputColumn(dtype=dtype, shape=list(array.shape[1:]))
        sizes = [column.row_bytes for column in self._columns.values()]
        unit = math.lcm(*(PAGE_TOKENS // math.gcd(PAGE_TOKENS, size) for size in sizes))
        self._file_samples = max(FILE_BYTES // (unit * max(sizes)), 1) * unit

    def _open_files(self) -> dict[str, IO[bytes]]:
        """Open the files of the next sample, and drop what was not synced."""
        number, row = divmod(self.num_done, self._file_samples)
        files: dict[str, IO[bytes]] = {}
        for name, column in self._columns.items():
            path = self._work / shard_name(name, number)
            files[name] = open(path, "ab")  # noqa: SIM115 # closed by `_end_files`
            files[name].truncate(row * column.row_bytes)
        return files

    def _end_files(self) -> None:
        for file in self._files.values():
            sync(file)
            file.close()
            path = Path(file.name)
            self._entries[path.name] = hash_file(path)
        self._files = {}

    def sync(self) -> None:
        """Make what is written durable, so that another writer can continue after it.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        for file in self._files.values():
            sync(file)
        if self._columns:
            progress = OutputProgress(
                num_samples=self.num_done,
                file_samples=self._file_samples,
                columns=self._columns,
                files=self._entries,
            )
            atomic_write(self._work / PROGRESS, progress.model_dump_json())
        self._synced = time.monotonic()

    def finish(self) -> None:
        """Write the index, and give the folder its name.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        if self.num_done % self._file_samples:
            self._files = self._files or self._open_files()  # another writer wrote the last ones
            self._end_files()
        manifest = OutputManifest(
            format=1,
            origin=self._origin,
            num_samples=self._num_samples,
            file_samples=self._file_samples,
            columns=self._columns,
            files=self._entries,
        )
        with open(self._work / INDEX, "wb") as file:
            file.write(serialize_manifest(manifest))
            sync(file)
        for name in (PROGRESS, "inputs"):
            (self._work / name).unlink(missing_ok=True)
        sync_folder(self._work)
        publish(self._work, self._folder)


def _read_progress(work: Path) -> OutputProgress | None:
    """Return what an interrupted writer has synced; None: nothing."""
    try:
        return OutputProgress.model_validate_json(read_regular(work / PROGRESS))
    except (OSError, ValidationError):
        return None
