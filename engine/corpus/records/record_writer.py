"""Writes record stores column by column, into .npy files whose lengths are known at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from ...core.files import sync_folder
from ...sources.documents import DocumentFault
from ..columns import FolderWriter, sync
from ..manifest import hash_file, serialize_manifest
from .record_manifest import INDEX, ColumnEntry, RecordManifest, list_files
from .record_store import RecordColumn, RecordStore, Sample

BUFFER_VALUES = 2**20
MAX_FAULTS = 20


class _ArrayFile:
    """Writes a 1-D .npy file of a length that is known only at the end.

    Args:
        file: the file to create.
        dtype: the dtype of the values.
    """

    def __init__(self, file: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.count = 0
        self.hash = xxh3_128()
        self._file: IO[bytes] = open(file, "xb")  # noqa: SIM115  `close` closes it
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads the header so that it stays as long when the first dimension grows.
        header = np.lib.format.header_data_from_array_1_0(np.empty(0, self.dtype))
        np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self.count,)})

    def write(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).view(np.uint8).data
        self._file.write(data)
        self.hash.update(data)
        self.count += len(values)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()
        sync(self._file)
        self.close()

    def close(self) -> None:
        self._file.close()


class _Column:
    """Writes a column in blocks.

    Args:
        folder: the folder of the store.
        name: the name of the column.
        first: the first sample's array, which decides the dtype and whether values are scalars.
    """

    def __init__(self, folder: Path, name: str, first: NDArray[Any]) -> None:
        self.name = name
        self.is_ragged = first.ndim == 1
        self.values = _ArrayFile(folder / f"{name}.npy", first.dtype)
        self.lengths: list[NDArray[np.int64]] = []
        self.offsets_file = folder / f"{name}.offsets.npy"
        self._waiting: list[NDArray[Any]] = []
        self._waiting_values = 0

    def add(self, array: NDArray[Any]) -> None:
        """Append one sample's array."""
        self._require_same_kind(array)
        self._waiting.append(array)
        self._waiting_values += array.size + 1
        if self._waiting_values >= BUFFER_VALUES:
            self.flush()

    def flush(self) -> None:
        """Write what `add` was given."""
        if self._waiting:
            self.lengths.append(np.array([array.size for array in self._waiting], dtype=np.int64))
            self.values.write(np.concatenate([np.atleast_1d(array) for array in self._waiting]))
        self._waiting, self._waiting_values = [], 0

    def _require_same_kind(self, array: NDArray[Any]) -> None:
        if array.ndim != self.is_ragged or not np.can_cast(array.dtype, self.values.dtype):
            expected = f"{self.values.dtype}, {int(self.is_ragged)}-D"
            found = f"{array.dtype}, {array.ndim}-D"
            raise TypeError(f"column {self.name!r}: {found}; the first sample has {expected}")

    def extend(self, first: NDArray[Any], column: RecordColumn) -> None:
        """Append the samples of a column of another store, of which the first is given."""
        self._require_same_kind(first)
        self.flush()
        for start in range(0, len(column.values), BUFFER_VALUES):
            self.values.write(column.values[start : start + BUFFER_VALUES])
        if column.offsets is not None:
            self.lengths.append(np.diff(column.offsets))

    def finish(self) -> ColumnEntry:
        """Complete the files and return the column's entry."""
        self.flush()
        self.values.finish()
        if self.is_ragged:
            offsets = _ArrayFile(self.offsets_file, np.dtype(np.int64))
            offsets.write(np.cumsum(np.concatenate([np.zeros(1, np.int64), *self.lengths])))
            self.values.hash.update(offsets.hash.digest())
            offsets.finish()
        entry = {"dtype": str(self.values.dtype), "num_values": self.values.count}
        return ColumnEntry.model_validate({**entry, "is_ragged": self.is_ragged})


@dataclass
class RecordTally:
    """Counts of records that were left out or cut.

    Attributes:
        skipped: records that cannot be read.
        dropped: records that are too long.
        truncated: records that were cut.
        faults: the reasons for the first skipped records.
    """

    skipped: int = 0
    dropped: int = 0
    truncated: int = 0
    faults: list[str | DocumentFault] = field(default_factory=list)

    def skip(self, fault: DocumentFault) -> None:
        """Count a record that cannot be read."""
        self.skipped += 1
        self.add_faults([fault])

    def add(self, other: RecordManifest) -> None:
        """Add the counts of another store."""
        self.skipped += other.skipped
        self.dropped += other.dropped
        self.truncated += other.truncated
        self.add_faults(other.faults)

    def add_faults(self, faults: Sequence[str | DocumentFault]) -> None:
        """Keep faults up to `MAX_FAULTS`."""
        self.faults += faults[: max(MAX_FAULTS - len(self.faults), 0)]


class RecordWriter(FolderWriter):
    """Writes a record store into a new folder; complete once `finish` has returned.

    Args:
        folder: the folder to create.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tally = RecordTally()
        self.num_records = 0
        self._columns: dict[str, _Column] = {}

    def add(self, sample: Sample) -> None:
        """Append a sample.

        Raises:
            ValueError: the sample has other columns than the first one.
        """
        for name, array in self._match(sample):
            self._columns[name].add(array)
        self.num_records += 1

    def extend(self, store: RecordStore) -> None:
        """Append the samples of a store, and add its counts."""
        self.tally.add(store.manifest)
        if store.num_rows:
            (first,) = store.read(np.zeros(1, dtype=np.int64))
            for name, array in self._match(first):
                self._columns[name].extend(array, store.columns[name])
            self.num_records += store.num_rows

    def _match(self, arrays: Sample) -> list[tuple[str, NDArray[Any]]]:
        """Return the arrays in the order of the columns, which the first sample makes."""
        if not self.num_records:
            self._columns = {
                name: _Column(self.folder, name, array) for name, array in arrays.items()
            }
            for column in self._columns.values():
                self.to_close.callback(column.values.close)
        if arrays.keys() != self._columns.keys():
            other = ", ".join(sorted(arrays.keys() ^ self._columns.keys()))
            raise ValueError(f"it differs from the first record in what it has: {other}")
        return [(name, arrays[name]) for name in self._columns]

    def finish(self) -> None:
        """Write the index, and sync all files to disk."""
        columns = {name: column.finish() for name, column in sorted(self._columns.items())}
        fingerprint = xxh3_128()
        for name in columns:
            fingerprint.update(name.encode() + self._columns[name].values.hash.digest())
        names = [file for name, column in columns.items() for file in list_files(name, column)]
        manifest = RecordManifest(
            format=1,
            num_records=self.num_records,
            columns=columns,
            fingerprint=fingerprint.hexdigest(),
            files={name: hash_file(self.folder / name) for name in names},
            **vars(self.tally),
        )
        with open(self.folder / INDEX, "xb") as file:
            file.write(serialize_manifest(manifest))
            sync(file)
        sync_folder(self.folder)
