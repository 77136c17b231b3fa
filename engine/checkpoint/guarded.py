"""Reads torch DCP files, without letting them run code.

Checkpoints of format 1, written before 0.1, have a manifest beside them; those of other programs
have not. DCP keeps its table of contents (`.metadata`) as a pickle, follows any path in it, and
unpickles what is not a tensor. Here the pickle may name only the classes of that table, paths are
plain names that the manifest or the folder lists, and only tensors are read, from where they lie in
their files.

Importing this module imports torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import EnumMeta
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..core.errors import CheckpointError
from ..core.files import open_regular
from .box import Box, covers
from .manifest import CONTENTS, Manifest, TensorEntry
from .tensors import ConcatenatedTensor, FileTensor, StoredChunk, TensorRows, dtype_name
from .torch_file import read_file_tensors, require_few_objects

# A part of a tensor takes about 150 bytes and 35 objects, and each file holds one part of a tensor.
MAX_CONTENTS_BYTES, CONTENTS_BESIDE, PART_BYTES = 2**28, 2**20, 512
BYTES_AN_OBJECT, OBJECTS_BESIDE = 3, 2**16
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name in vars(torch) if isinstance(vars(torch)[name], torch.dtype)},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def read_chunks(
    folder: Path, manifest: Manifest, names: Collection[str]
) -> dict[str, list[StoredChunk]]:
    """Find the parts of some tensors of a checkpoint of format 1.

    Raises:
        CheckpointError: the table of contents is not what the manifest says.
    """
    contents = read_contents(folder, manifest)
    chunks: dict[str, list[StoredChunk]] = {}
    with readable(folder):
        for name in names:
            entry = cast("TensorStorageMetadata", contents.state_dict_metadata[name])
            chunks[name] = [
                StoredChunk(tuple(chunk.offsets), _find_chunk(folder, contents, name, chunk))
                for chunk in entry.chunks
            ]
    return chunks


def read_tensors(folder: Path) -> dict[str, TensorRows]:
    """Find all tensors of a DCP folder that another program wrote; nothing else in it is read.

    Raises:
        CheckpointError: the table of contents cannot be read, asks for code, or makes no sense.
    """
    with readable(folder):
        files = {path.name for path in folder.iterdir() if path.suffix == ".distcp"}
        contents = _load(folder, MAX_CONTENTS_BYTES)
        if not isinstance(contents, Metadata):
            raise CheckpointError(f"{folder}: {CONTENTS} holds no table of contents")
        _check_places(folder, contents, files)
        tensors: dict[str, TensorRows] = {}
        for name, entry in contents.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                tensors[name] = _open_tensor(folder, contents, name, entry)
        return tensors


def _open_tensor(
    folder: Path, contents: Metadata, name: str, entry: TensorStorageMetadata
) -> TensorRows:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    chunks = [
        StoredChunk(tuple(chunk.offsets), _find_chunk(folder, contents, name, chunk))
        for chunk in entry.chunks
    ]
    if not covers(shape, [Box(start, part.shape) for start, part in chunks]):
        raise CheckpointError(f"{folder}: the parts of {name} do not make it up")
    if len(chunks) == 1:
        return chunks[0].tensor
    return ConcatenatedTensor(dtype, shape, tuple(chunks))


def read_contents(path: Path, manifest: Manifest) -> Metadata:
    """Return DCP's table of contents, after comparing it with the manifest.

    Raises:
        CheckpointError: it is not what the manifest says, or asks for code.
    """
    with readable(path):
        parts = len(manifest.tensors) * len(manifest.files)
        limit = min(CONTENTS_BESIDE + PART_BYTES * parts, MAX_CONTENTS_BYTES)
        contents = _load(path, limit)
        _check(path, contents, manifest)
    return cast("Metadata", contents)


def _load(path: Path, limit: int) -> Any:
    """Return what a table of contents holds, of at most `limit` bytes."""
    with open_regular(path / CONTENTS) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CheckpointError(f"{path}: {CONTENTS} has more than {limit} bytes")
    require_few_objects(content, OBJECTS_BESIDE + len(content) // BYTES_AN_OBJECT)
    return _Unpickler(io.BytesIO(content)).load()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Explain whatever a table of contents that makes no sense leads to.

    Raises:
        CheckpointError: something was raised in the block.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor in a `.distcp` file, which holds one archive of `torch.save` after another."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows.

        Raises:
            CheckpointError: the archive holds something else.
        """
        return self._stored.read(first, last)

    @cached_property
    def _stored(self) -> FileTensor:
        # Only now is the archive opened: a rank does not need every other rank's parts.
        with readable(self.file.parent):
            stored = read_file_tensors(self.file, self.offset, self.length)
        if not isinstance(stored, FileTensor) or stored.dtype != self.dtype:
            raise CheckpointError(f"{self.file} holds something else at {self.name}")
        if stored.shape != self.shape:
            raise CheckpointError(f"{self.file}: a part of {self.name} has the wrong shape")
        return stored


def _find_chunk(
    folder: Path, contents: Metadata, name: str, chunk: ChunkStorageMetadata
) -> ArchivedTensor:
    info = contents.storage_data.get(MetadataIndex(name, chunk.offsets))
    if info is None:
        raise CheckpointError(f"{folder}: {CONTENTS} does not say where {name} lies")
    entry = cast("TensorStorageMetadata", contents.state_dict_metadata[name])
    file = folder / info.relative_path
    dtype, shape = entry.properties.dtype, tuple(chunk.sizes)
    return ArchivedTensor(name, dtype, shape, file, info.offset, info.length)


class _Unpickler(pickle._Unpickler):
    """The one in Python: a number in the file makes the one in C take gigabytes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the table of contents, and nothing else."""
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # how some releases of Python 3.11 pickle members of enums
        if name not in ALLOWED.get(module, ()):
            raise CheckpointError(f"{CONTENTS} asks for {module}.{name}: refused")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Give an object its attributes; a class would keep them for the rest of the process."""
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise CheckpointError(f"{CONTENTS} changes a class: refused")
        super().load_build()  # type: ignore[misc]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]


def _enum_member(owner: Any, name: Any) -> Any:
    """Return a member of an enum that may be named, and no other attribute of anything."""
    if not isinstance(owner, EnumMeta) or name not in owner.__members__:
        raise CheckpointError(f"{CONTENTS} asks for {name} of {owner}: refused")
    return owner.__members__[name]


def _check(path: Path, contents: Any, manifest: Manifest) -> None:
    if not isinstance(contents, Metadata):
        raise CheckpointError(f"{path}: {CONTENTS} holds no table of contents")
    if _entries(contents) != manifest.tensors:
        raise CheckpointError(f"{path}: {CONTENTS} lists other tensors than the manifest")
    _check_places(path, contents, manifest.files)


def _check_places(path: Path, contents: Metadata, files: Collection[str]) -> None:
    for info in contents.storage_data.values():
        if info.relative_path not in files:
            raise CheckpointError(f"{path}: {CONTENTS} points to {info.relative_path!r}")
        if info.transform_descriptors:
            raise CheckpointError(f"{path}: {CONTENTS} asks for a transformation")


def _entries(contents: Metadata) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(shape=list(entry.size), dtype=dtype_name(entry.properties.dtype))
        for name, entry in contents.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
