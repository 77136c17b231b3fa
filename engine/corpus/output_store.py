"""Outputs of a frozen model on disk: an array a column, with a row for each sample of a split.

The arrays lie in files of whole pages, one after the other, and are memory-mapped. The index lists
the files that are complete: a writer that was interrupted continues after them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from xxhash import xxh3_128_hexdigest

from ..core.config import Count, Table
from ..core.errors import DataError
from ..core.files import atomic_write, publish
from .cache import unfinished_folder
from .checksums import Share, require_intact
from .columns import map_files, sync
from .manifest import (
    PAGE_TOKENS,
    TokenFileEntry,
    read_index,
    require_files,
    serialize_manifest,
    shard_name,
    verify_first_line,
)

INDEX: Final = "outputs.json"
FILE_BYTES = 2**28
FILE_SAMPLES = 2**13
"""an interrupted writer computes at most so many samples again, if they fill whole pages"""
MAX_FILES = 2**20
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


class OutputManifest(Table):
    """`outputs.json`."""

    format: Literal[1]
    origin: dict[str, Any]
    """what the outputs were made from, by key of the recipe"""
    num_samples: Count
    file_samples: Count
    """samples a file; the last one of a column has fewer"""
    columns: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], OutputColumn],
        Field(min_length=1, max_length=16),
    ]
    files: dict[str, TokenFileEntry]
    """those that are complete"""

    @model_validator(mode="after")
    def _names_its_own_files(self) -> OutputManifest:
        """Refuse files that the counts do not imply, so that no other file is ever opened."""
        if self.num_files * len(self.columns) > MAX_FILES:
            raise ValueError(f"file_samples: more than {MAX_FILES} files")
        sizes = {}
        for name, column in self.columns.items():
            # Files are mapped end to end, which whole pages alone allow.
            if self.num_files > 1 and self.file_samples * column.row_bytes % PAGE_TOKENS:
                raise ValueError(f"file_samples: files of {name} are no whole pages")
            for number, file in enumerate(self.list_files(name)):
                rows = min(self.num_samples - number * self.file_samples, self.file_samples)
                sizes[file] = rows * column.row_bytes
        if any(sizes.get(name) != entry.bytes for name, entry in self.files.items()):
            raise ValueError(f"files: not those of {self.num_samples} samples")
        return self

    @property
    def num_files(self) -> int:
        """The number of files of a column."""
        return -(-self.num_samples // self.file_samples)

    @property
    def num_done(self) -> int:
        """The number of samples in complete files."""
        return min(len(self.files) // len(self.columns) * self.file_samples, self.num_samples)

    def list_files(self, column: str) -> list[str]:
        """Return the names of the files of a column, in order."""
        return [shard_name(column, number) for number in range(self.num_files)]


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
            if manifest.num_done < manifest.num_samples:
                raise DataError(
                    f"{folder}: holds {manifest.num_done} samples of {manifest.num_samples}"
                )
            require_files(folder, INDEX, manifest.files)
            require_intact(folder, cache, share, manifest.files)
        except DataError as error:
            raise DataError(error.message, AGAIN) from error
        columns = {}
        for name, column in manifest.columns.items():
            files = [folder / file for file in manifest.list_files(name)]
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
        origin: what the outputs are made from, as JSON has it; unfinished work of another origin is
            deleted.
        num_samples: how many samples there are.
    """

    def __init__(self, folder: Path, origin: Mapping[str, Any], num_samples: int) -> None:
        self._folder, self._work = folder, unfinished_folder(folder)
        self._origin, self._num_samples = dict(origin), num_samples
        self._manifest: OutputManifest | None = None
        with suppress(DataError):
            self._manifest = read_output_manifest(self._work)
        if self._manifest is None or self._manifest.origin != self._origin:
            self._manifest = None
            shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True, exist_ok=True)
        self.num_done = self._manifest.num_done if self._manifest else 0
        """samples that `write` got"""
        self._waiting: list[Arrays] = []

    def write(self, arrays: Arrays) -> None:
        """Append the rows of the next samples.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        manifest = self._manifest = self._manifest or self._begin(arrays)
        self._waiting.append(arrays)
        self.num_done += len(next(iter(arrays.values())))
        is_last = self.num_done == manifest.num_samples
        while (is_last and manifest.num_done < self.num_done) or (
            self.num_done - manifest.num_done >= manifest.file_samples
        ):
            manifest = self._manifest = self._write_files(manifest)

    def finish(self) -> None:
        """Give the folder its name, after the last sample.

        Raises:
            OSError: it cannot be renamed.
        """
        publish(self._work, self._folder)

    def _begin(self, arrays: Arrays) -> OutputManifest:
        """Settle the columns, and how many samples make a file of whole pages."""
        columns = {}
        for name, array in arrays.items():
            dtype: Any = "int32" if array.dtype.kind == "i" else "float32"
            columns[name] = OutputColumn(dtype=dtype, shape=list(array.shape[1:]))
        sizes = [column.row_bytes for column in columns.values()]
        unit = math.lcm(*(PAGE_TOKENS // math.gcd(PAGE_TOKENS, size) for size in sizes))
        count = min(FILE_BYTES // max(sizes), FILE_SAMPLES)
        return OutputManifest(
            format=1,
            origin=self._origin,
            num_samples=self._num_samples,
            file_samples=max(count // unit, 1) * unit,
            columns=columns,
            files={},
        )

    def _write_files(self, manifest: OutputManifest) -> OutputManifest:
        """Write the next file of each column, and then the index."""
        count, number = manifest.file_samples, manifest.num_done // manifest.file_samples
        files, rest = dict(manifest.files), {}
        for name, column in manifest.columns.items():
            rows = np.concatenate([arrays[name] for arrays in self._waiting])
            data = rows[:count].astype(column.dtype, order="C").data
            rest[name] = rows[count:]
            path = self._work / shard_name(name, number)
            with open(path, "wb") as file:
                file.write(data)
                sync(file)
            files[path.name] = TokenFileEntry(bytes=data.nbytes, xxh3=xxh3_128_hexdigest(data))
        self._waiting = [rest]
        manifest = manifest.model_copy(update={"files": files})
        atomic_write(self._work / INDEX, serialize_manifest(manifest).decode())
        return manifest
