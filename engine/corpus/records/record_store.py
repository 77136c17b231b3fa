"""Memory-maps record stores: samples as columns of .npy files.

A column of scalars is one array. A column of 1-D arrays is the array of all values, end to end, and
the array of offsets at which each sample's values begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError, EnvironmentFault
from ...core.files import require_regular
from ..manifest import AGAIN
from .record_manifest import RecordManifest, read_record_manifest

Sample = dict[str, NDArray[Any]]
"""the arrays of one sample by column: 1-D, or 0-D for a scalar"""


@dataclass(frozen=True)
class RecordColumn:
    """The values of a column.

    Attributes:
        values: [num_values]; those of all samples, end to end.
        offsets: [num_records + 1] int64; where each sample's values begin. None: a scalar each.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class RecordStore:
    """The samples of a source as columns, memory-mapped.

    Attributes:
        columns: the columns by name.
        num_rows: the number of samples.
        manifest: the counts and checksums.
        folder: the folder of the files.
    """

    columns: Mapping[str, RecordColumn]
    num_rows: int
    manifest: RecordManifest
    folder: Path

    @staticmethod
    def open_folder(folder: Path) -> RecordStore:
        """Memory-map a folder written by `RecordWriter`.

        Raises:
            DataError: the folder is missing or incomplete.
            EnvironmentFault: a file cannot be read.
        """
        manifest = read_record_manifest(folder)
        rows, columns = manifest.num_records, {}
        for name, entry in manifest.columns.items():
            file = folder / f"{name}.npy"
            values = _map(file, np.dtype(entry.dtype), entry.num_values)
            offsets = None
            if entry.is_ragged:
                file = folder / f"{name}.offsets.npy"
                offsets = _map(file, np.dtype(np.int64), rows + 1)
            fits = entry.num_values == rows if offsets is None else offsets[-1] == len(values)
            if not fits:
                raise DataError(f"{file}: not a column of {rows} records", AGAIN)
            columns[name] = RecordColumn(values, offsets)
        return RecordStore(columns, rows, manifest, folder)

    def read(self, rows: NDArray[np.int64]) -> list[Sample]:
        """Return the samples of these rows, as views of the columns."""
        samples: list[Sample] = [{} for _ in rows]
        for name, column in self.columns.items():
            values, offsets = column.values, column.offsets
            if offsets is None:
                for sample, value in zip(samples, values[rows], strict=True):
                    sample[name] = value
                continue
            borders = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
            for sample, (start, stop) in zip(samples, borders, strict=True):
                sample[name] = values[start:stop]
        return samples


def _map(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Memory-map a 1-D .npy file of `count` values."""
    try:
        require_regular(file)
        # A plain array: slices of np.memmap run Python code each time.
        values = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
        fits = values.dtype == dtype and values.shape == (count,)
    except OSError as error:
        raise EnvironmentFault(f"{file}: {error.strerror}") from error
    except (ValueError, EOFError, SyntaxError):
        fits = False
    if not fits:
        raise DataError(f"{file}: not an array of {count} {dtype}", AGAIN)
    return values
