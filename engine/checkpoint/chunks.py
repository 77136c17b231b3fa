"""Where each part of each tensor lies in a checkpoint's safetensors files: `index.json`.

A checkpoint has one safetensors file a rank, `shard-00000.safetensors` and so on, with the parts of
tensors that the rank wrote. The index says where every part begins in its tensor and in its file:

    {"files": ["shard-00000.safetensors"],
     "chunks": {"model.embed.weight": [[0, 312, [0, 0], [256, 64]]]}}

with the file's number, the offset in bytes, the start and the shape of each part. Dtypes and whole
shapes stand in the manifest. Format of the files: https://huggingface.co/docs/safetensors, with the
starts in the metadata, where torch's `HuggingFaceStorageReader` looks for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import xxhash
from pydantic import FailFast, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..core.errors import CheckpointError
from ..core.files import open_regular, require_regular
from .box import Box, covers
from .manifest import CONTENTS, FileEntry, Manifest, TensorEntry
from .tensors import FileTensor, StoredChunk, TensorRows, TensorSpec, dtype_name, nbytes

INDEX = "index.json"
# A part takes about 40 bytes. Read, an index takes up to 20 times its size.
MAX_INDEX_BYTES, BYTES_BESIDE, PART_BYTES = 2**26, 2**20, 128
CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""names of dtypes in safetensors files"""
DTYPES = {dtype_name(dtype): dtype for dtype in CODES}
"""dtypes by their names in the manifest"""

Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
# The first fault is enough: an error for each item of a hostile index would take gigabytes.
Counts = Annotated[list[Count], FailFast()]
Chunks = Annotated[list[tuple[Count, Count, Counts, Counts]], FailFast()]


class Index(TypedDict):
    """The content of `index.json`."""

    files: Annotated[list[str], FailFast()]
    chunks: dict[str, Chunks]


INDEX_TYPE = TypeAdapter(Index)


@dataclass(frozen=True)
class LocalChunk:
    """A part of a tensor that one rank writes.

    Attributes:
        name: full name of the tensor, such as `model.embed.weight`.
        shape: shape of the whole tensor.
        box: the part.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def bytes(self) -> int:
        """Size of the part."""
        return nbytes(self.box.sizes, self.dtype)


@dataclass(frozen=True)
class FileLayout:
    """The first bytes of a safetensors file, where each tensor begins, and the size of the file."""

    head: bytes
    offsets: dict[str, int]
    size: int


def lay_out_file(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Decide where each tensor lies in a safetensors file.

    Args:
        tensors: dtype and shape by name.
        metadata: texts that go into the header.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    starts, position = {}, 0
    # The library stores wide elements first, so that every tensor is aligned.
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        starts[name] = position
        end = position + nbytes(shape, dtype)
        header[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the library has it
    head = len(text).to_bytes(8, "little") + text
    offsets = {name: len(head) + start for name, start in starts.items()}
    return FileLayout(head, offsets, len(head) + position)


def lay_out_chunks(chunks: Sequence[LocalChunk]) -> FileLayout:
    """Decide where each chunk lies in the file of the rank that writes it."""
    starts = {chunk.name: {"saved_offsets": chunk.box.start} for chunk in chunks}
    return lay_out_file(
        {chunk.name: (chunk.dtype, chunk.box.sizes) for chunk in chunks},
        {"DCP_SHARDING_INFO": json.dumps(starts)},  # torch's HuggingFaceStorageReader needs it
    )


def file_name(number: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{number:05d}.safetensors"


def write_index(folder: Path, files: Sequence[Sequence[LocalChunk]]) -> FileEntry:
    """Write and sync the index of a checkpoint.

    Args:
        files: the chunks of each file, by the number of the file.
    """
    written = [number for number, chunks in enumerate(files) if chunks]
    index = Index(files=[file_name(number) for number in written], chunks={})
    for position, number in enumerate(written):
        offsets = lay_out_chunks(files[number]).offsets
        for chunk in files[number]:
            part = (position, offsets[chunk.name], list(chunk.box.start), list(chunk.box.sizes))
            index["chunks"].setdefault(chunk.name, []).append(part)
    with open(folder / INDEX, "xb") as file:
        content = json.dumps(index, separators=(",", ":")).encode()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))


def tensor_entries(files: Iterable[Iterable[LocalChunk]]) -> dict[str, TensorEntry]:
    """Return every tensor that has a chunk in a file, as the manifest lists it."""
    return {
        chunk.name: TensorEntry(shape=list(chunk.shape), dtype=dtype_name(chunk.dtype))
        for chunks in files
        for chunk in chunks
    }


def read_chunks(
    folder: Path, manifest: Manifest, names: Collection[str]
) -> dict[str, list[StoredChunk]]:
    """Find the chunks of some tensors of a checkpoint.

    Raises:
        CheckpointError: the index is not what the manifest says, or the chunks of a tensor do not
            cover every element once.
    """
    for name in names:
        if manifest.tensors[name]["dtype"] not in DTYPES:
            raise CheckpointError(f"{folder}: {name} has a dtype that is not read")
    if manifest.format == 1:
        chunks: dict[str, list[StoredChunk]] = _guarded().read_chunks(folder, manifest, names)
    else:
        index = _read_index(folder, manifest)
        chunks = {name: _open_chunks(folder, manifest, index, name) for name in names}
    # Before anything is read: a gap would leave old numbers in the state without an error.
    for name, parts in chunks.items():
        boxes = [Box(part.start, part.tensor.shape) for part in parts]
        if not covers(manifest.tensors[name]["shape"], boxes):
            raise CheckpointError(f"{folder}: the parts of {name} do not make it up")
    return chunks


def read_dcp(folder: Path) -> dict[str, TensorRows]:
    """Return the tensors of a torch DCP folder that another program wrote, by name.

    Raises:
        CheckpointError: the folder cannot be read, or asks for code.
    """
    if not (folder / CONTENTS).is_file():
        raise CheckpointError(
            f"{folder} has no {CONTENTS}: it is no folder of torch.distributed.checkpoint",
            "name the folder of one step, such as checkpoint/step-1000",
        )
    tensors: dict[str, TensorRows] = _guarded().read_tensors(folder)
    return tensors


def _guarded() -> Any:
    # Imports torch.distributed.checkpoint, which nothing else here needs any more.
    from . import guarded

    return guarded


def _read_index(folder: Path, manifest: Manifest) -> Index:
    limit = BYTES_BESIDE + PART_BYTES * len(manifest.tensors) * len(manifest.files)
    limit = min(limit, MAX_INDEX_BYTES)
    path = folder / INDEX
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise CheckpointError(f"{path} has more than {limit} bytes")
        index: Index = INDEX_TYPE.validate_python(json.loads(content))
        # Offsets are read from these later by plain `open`, which would wait for a fifo's writer.
        for name in {*index["files"]} & {*manifest.files}:
            require_regular(folder / name)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        where, reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise CheckpointError(f"{path}: {'.'.join(map(str, where))}: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if index["chunks"].keys() != manifest.tensors.keys():
        raise CheckpointError(f"{path} lists other tensors than the manifest")
    for name in index["files"]:
        if name not in manifest.files:
            raise CheckpointError(f"{path} points to {name!r}")
    return index


def _open_chunks(folder: Path, manifest: Manifest, index: Index, name: str) -> list[StoredChunk]:
    dtype, chunks = DTYPES[manifest.tensors[name]["dtype"]], []
    for number, offset, start, sizes in index["chunks"][name]:
        file = index["files"][number] if number < len(index["files"]) else ""
        size = manifest.files[file]["bytes"] if file else 0
        if offset + nbytes(sizes, dtype) > size:
            raise CheckpointError(f"{folder}: {INDEX} places {name} outside of its file")
        tensor = FileTensor(folder / file, offset, dtype, tuple(sizes))
        chunks.append(StoredChunk(tuple(start), tensor))
    return chunks
