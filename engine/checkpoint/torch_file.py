"""What `torch.save` wrote, read without running code and without reading the data.

The one place that calls `torch.load`: its restricted unpickler builds tensors on `meta`, and tells
where in the file the data of each lies. The file is a zip archive whose records are not compressed.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.files import open_regular
from .tensors import BLOCK_BYTES, FileTensor, TensorSpec, nbytes

ENTRY = b"PK\x01\x02"
"""Begins an entry of an archive's table of contents."""
MAX_PICKLE_BYTES = 2**24
MAX_RECORDS = 2**20
MAX_HEADER_BYTES = 30 + 2 * 2**16
# Objects are up to 150 times larger than the bytes of a pickle that ask for them. These bytes begin
# dictionaries, lists and tuples, call functions, and remember results.
MAKING = (b"}", b"]", b"(", b"R", b"\x81", b"\x94")
# A tensor takes six, and letters of its name may look like them.
MAX_MADE, MADE_BY_RECORD, MADE_BESIDE = 2**21, 16, 2**18


def read_file_tensors(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return what a file holds, with a `FileTensor` in the place of each tensor.

    Args:
        start: where in the file the archive begins, and its `size`.

    Raises:
        CheckpointError: it is not such a file, asks for code, or its parts do not fit together.
    """
    try:
        size = path.stat().st_size - start if size is None else size
        with open_regular(path) as file:
            section = _Section(file, start, size)
            records = _records(section)
            section.seek(0)
            # "meta": shapes and places without data; `weights_only`: no class is looked up.
            # Meta's files of Llama 4 hold bytes too, which run nothing and are left.
            with torch.serialization.safe_globals([io.BytesIO]):
                content = torch.load(
                    cast("IO[bytes]", section), map_location="meta", weights_only=True
                )
        return _replace(content, lambda tensor: _region(tensor, path, start, records), {})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}", error.hint) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged archive makes zipfile and torch raise
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{path} is not read: {type(error).__name__}: {reason}",
            "only tensors in plain dictionaries are read, as torch.save writes them since 1.6",
        ) from error


def write_without_data(path: Path, forms: Mapping[str, TensorSpec]) -> dict[str, FileTensor]:
    """Write a file as `torch.save` does, without its data; return where each tensor's belongs."""
    from ...kernels.torch_private import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        state = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in forms.items()}
        with open(path, "xb") as file:  # of a name, torch makes one for the archive, if it can
            torch.save(state, file)
    regions: dict[str, FileTensor] = read_file_tensors(path)
    return regions


def encode_descriptor(checksum: int) -> bytes:
    """Return the first bytes after the data of a record of a CRC-32."""
    return b"PK\x07\x08" + checksum.to_bytes(4, "little")


def fill_checksums(path: Path) -> None:
    """Copy the CRC-32 behind each record of data to the archive's table of contents."""
    with open(path, "r+b") as file, zipfile.ZipFile(file) as archive:
        file.seek(archive.start_dir)
        places = dict(_checksum_places(file.read()))
        for entry in archive.infolist():
            if "/data/" in entry.filename and entry.file_size:
                file.seek(_data_offset(file, entry) + entry.file_size + 4)
                checksum = file.read(4)
                file.seek(archive.start_dir + places[entry.filename])
                file.write(checksum)


def check_records(path: Path) -> str:
    """Compare the records of a file with their CRC-32; 0 stands for none, as torch can write it.

    Returns:
        nothing.

    Raises:
        CheckpointError: one differs.
    """
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        for entry in filter(lambda entry: entry.CRC, archive.infolist()):
            try:
                with archive.open(entry) as record:
                    while record.read(BLOCK_BYTES):
                        pass
            except zipfile.BadZipFile as error:
                raise CheckpointError(
                    f"{path} is damaged: {error}", "download it again, or save it again"
                ) from error
    return ""


def _checksum_places(directory: bytes | bytearray) -> Iterator[tuple[str, int]]:
    """Yield each record's name, and where its CRC-32 lies in an archive's table of contents."""
    at = 0
    while directory[at : at + 4] == ENTRY:
        name, *others = struct.unpack_from("<HHH", directory, at + 28)
        yield directory[at + 46 : at + 46 + name].decode(), at + 16
        at += 46 + name + sum(others)


def _data_offset(file: IO[bytes] | _Section, entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset + 26)
    lengths = file.read(4) or b""
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return entry.header_offset + 30 + name + extra


class _Section(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, size: int) -> None:
        self._file, self._start, self._size = file, start, size
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, up to the end of the part."""
        view = memoryview(buffer)[: max(0, self._size - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)
        self._position += count
        return count


def _records(section: _Section) -> dict[int, int]:
    """Return the place and the size of each record of data."""
    with zipfile.ZipFile(section) as archive:
        entries = archive.infolist()
    if len(entries) > MAX_RECORDS:
        raise CheckpointError(f"{len(entries)} records; at most {MAX_RECORDS} are read")
    places, most = {}, min(MAX_MADE, MADE_BESIDE + MADE_BY_RECORD * len(entries))
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(f"the record {entry.filename[:80]!r} is compressed: not read")
        if "/data/" in entry.filename:
            places[_data_offset(section, entry)] = entry.file_size
        elif entry.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"a record of {entry.file_size} bytes beside the data: not read")
        elif entry.filename.endswith("/data.pkl"):
            section.seek(entry.header_offset)
            pickled = section.read(entry.file_size + MAX_HEADER_BYTES) or b""
            require_few_objects(pickled, most)
        elif entry.filename.endswith("/byteorder"):
            section.seek(entry.header_offset)
            if b"big" in (section.read(200) or b""):
                raise CheckpointError("its numbers are big-endian: not read")
    return places


def require_few_objects(pickled: bytes, most: int) -> None:
    """Refuse a pickle that could make many more objects than its size tells.

    Raises:
        CheckpointError: more bytes than `most` may ask for an object.
    """
    if (made := sum(map(pickled.count, MAKING))) > most:
        raise CheckpointError(f"its pickle asks for {made} objects; at most {most} are made")


def _region(tensor: Tensor, path: Path, start: int, records: Mapping[int, int]) -> FileTensor:
    storage, shape = tensor.untyped_storage(), tuple(tensor.shape)
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_contiguous():
        raise CheckpointError(
            f"a tensor {list(shape)} is not plain and contiguous: not read",
            "save it after .contiguous()",
        )
    offset = int(getattr(storage, "_checkpoint_offset", None) or 0)
    first = int(tensor.storage_offset()) * tensor.element_size()
    # A view may claim more than its storage holds: reading it would return another tensor's bytes.
    if offset not in records or first + nbytes(shape, tensor.dtype) > records[offset]:
        raise CheckpointError(f"a tensor {list(shape)} has more elements than its record")
    return FileTensor(path, start + offset + first, tensor.dtype, shape)


def _replace(
    content: Any, make: Callable[[Tensor], FileTensor], made: dict[int, Any], depth: int = 0
) -> Any:
    """Put a region in the place of each tensor; what is there several times is made once.

    Args:
        content: which the caller keeps, so that its objects keep their ids.
        made: results by the ids of what they were made from.
    """
    if id(content) not in made:
        if isinstance(content, Tensor):
            made[id(content)] = make(content)
        elif isinstance(content, Mapping) and depth < 8:
            made[id(content)] = {
                key: _replace(value, make, made, depth + 1) for key, value in content.items()
            }
        else:
            return content
    return made[id(content)]
