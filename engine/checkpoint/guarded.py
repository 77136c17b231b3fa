"""Reads DCP files without letting them run code.

DCP keeps its table of contents (`.metadata`) as a pickle, follows any path in it, and unpickles
what is not a tensor. Here the pickle may name only the classes of that table, paths are plain names
that the manifest lists, and only tensors are read.

Importing this module imports torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ..errors import CheckpointError
from .manifest import Manifest, TensorEntry
from .writer import dtype_name

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
    reader = _Reader(path, manifest)
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        metadata = reader.read_metadata()
        planner.set_up_planner(dict(state), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def read_contents(path: Path, manifest: Manifest) -> Metadata:
    """Return DCP's table of contents, after comparing it with the manifest.

    Raises:
        CheckpointError: it is not what the manifest says, or asks for code.
    """
    try:
        return _Reader(path, manifest).read_metadata()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the table of contents, and nothing else."""
        if name not in ALLOWED.get(module, ()):
            raise CheckpointError(f".metadata asks for {module}.{name}: refused")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of contents, after comparing it with the manifest."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}: .metadata holds no table of contents")
        if _entries(metadata) != self._manifest.tensors:
            raise CheckpointError(f"{self.path}: .metadata lists other tensors than the manifest")
        for info in metadata.storage_data.values():
            if info.relative_path not in self._manifest.files:
                raise CheckpointError(f"{self.path}: .metadata points to {info.relative_path!r}")
            if info.transform_descriptors:
                raise CheckpointError(f"{self.path}: .metadata asks for a transformation")
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse what is not a tensor: DCP would unpickle it."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor: refused")


def _entries(metadata: Metadata) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(shape=list(entry.size), dtype=dtype_name(entry.properties.dtype))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
