"""Reads DCP files without letting them run code or fill the memory.

DCP keeps its table of contents (`.metadata`) as a pickle, follows any path in it, and unpickles
what is not a tensor. Here the pickle may name only the classes of that table, paths are plain names
that the manifest lists, and only tensors are read, from where they lie in their files.

Importing this module imports torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from ..core.errors import CheckpointError
from ..core.files import open_regular
from .manifest import Manifest, TensorEntry
from .tensors import FileTensor
from .torch_file import read_file_tensors, require_few_objects
from .writer import dtype_name

CONTENTS = ".metadata"
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


def read_tensors(path: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Fill tensors and DTensors in place, each rank its own shards, without communication.

    Raises:
        CheckpointError: the files are not what the manifest says, or cannot be read.
    """
    contents = read_contents(path, manifest)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with readable(path):
        planner.set_up_planner(dict(state), contents)
        items = planner.create_local_plan().items
        _require_all(path, state, items)
        for item in items:
            index = item.storage_index
            region = find_chunk(path, contents, index.fqn, cast("int", index.index))
            part = _read_box(region, item.storage_offsets, item.lengths)
            planner.resolve_tensor(item).detach().copy_(part)


def read_contents(path: Path, manifest: Manifest) -> Metadata:
    """Return DCP's table of contents, after comparing it with the manifest.

    Raises:
        CheckpointError: it is not what the manifest says, or asks for code.
    """
    with readable(path):
        parts = len(manifest.tensors) * len(manifest.files)
        limit = min(CONTENTS_BESIDE + PART_BYTES * parts, MAX_CONTENTS_BYTES)
        with open_regular(path / CONTENTS) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise CheckpointError(f"{path}: {CONTENTS} has more than {limit} bytes")
        require_few_objects(content, OBJECTS_BESIDE + len(content) // BYTES_AN_OBJECT)
        contents = _Unpickler(io.BytesIO(content)).load()
        _check(path, contents, manifest)
    return cast("Metadata", contents)


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


def find_chunk(folder: Path, contents: Metadata, name: str, number: int) -> FileTensor:
    """Return where a part of a tensor lies, by its number among the tensor's chunks.

    Raises:
        CheckpointError: it does not lie where the table of contents says.
    """
    entry = cast("TensorStorageMetadata", contents.state_dict_metadata[name])
    chunk, dtype = entry.chunks[number], entry.properties.dtype
    info = contents.storage_data.get(MetadataIndex(name, chunk.offsets))
    if info is None:
        raise CheckpointError(f"{folder}: {CONTENTS} does not say where {name} lies")
    region = read_file_tensors(folder / info.relative_path, info.offset, info.length)
    if not isinstance(region, FileTensor) or region.dtype != dtype:
        raise CheckpointError(f"{folder}: {info.relative_path} holds something else at {name}")
    if region.shape != tuple(chunk.sizes):
        raise CheckpointError(f"{folder}: a part of {name} has the wrong shape")
    return region


class _Unpickler(pickle._Unpickler):
    """The one in Python: a number in the file makes the one in C take gigabytes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the table of contents, and nothing else."""
        if name not in ALLOWED.get(module, ()):
            raise CheckpointError(f"{CONTENTS} asks for {module}.{name}: refused")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Give an object its attributes; a class would keep them for the rest of the process."""
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise CheckpointError(f"{CONTENTS} changes a class: refused")
        super().load_build()  # type: ignore[misc]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]


def _check(path: Path, contents: Any, manifest: Manifest) -> None:
    if not isinstance(contents, Metadata):
        raise CheckpointError(f"{path}: {CONTENTS} holds no table of contents")
    if _entries(contents) != manifest.tensors:
        raise CheckpointError(f"{path}: {CONTENTS} lists other tensors than the manifest")
    for info in contents.storage_data.values():
        if info.relative_path not in manifest.files:
            raise CheckpointError(f"{path}: {CONTENTS} points to {info.relative_path!r}")
        if info.transform_descriptors:
            raise CheckpointError(f"{path}: {CONTENTS} asks for a transformation")


def _entries(contents: Metadata) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(shape=list(entry.size), dtype=dtype_name(entry.properties.dtype))
        for name, entry in contents.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _require_all(path: Path, state: Mapping[str, Tensor], items: Sequence[ReadItem]) -> None:
    """Check that the parts that will be read make up this rank's part of each tensor."""
    missing = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
        for name, tensor in state.items()
    }
    for item in items:
        missing[item.dest_index.fqn] -= item.lengths.numel()
    for name, count in missing.items():
        if count:
            raise CheckpointError(f"{path}: the parts of {name} do not make it up")


def _read_box(region: FileTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a part of a region; a scalar has no offsets."""
    if not region.shape:
        return region.read(0, 1)
    rows = region.read(offsets[0], offsets[0] + sizes[0])
    sides = zip(offsets[1:], sizes[1:], strict=True)
    return rows[(slice(None), *(slice(start, start + size) for start, size in sides))]
