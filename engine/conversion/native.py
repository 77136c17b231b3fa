"""Our checkpoints as conversion reads and writes them: torch DCP files and a manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..checkpoint.guarded import CONTENTS, find_chunk, read_contents, readable
from ..checkpoint.manifest import FileEntry, Manifest, SaveInfo, check_listing, write_manifest
from ..checkpoint.tensors import ConcatenatedTensor, Form, TensorRows, nbytes
from ..checkpoint.torch_file import Archive
from ..checkpoint.writer import dtype_name, file_entry
from ..core.errors import CheckpointError
from .writing import Advance, Content, Extent, create, sync, whole, write_all

FILE_BYTES = 2**28
"""A file is written by one thread, which hashes it meanwhile: there are enough for all cores."""
MAX_FILES = 64


def read_section(folder: Path, manifest: Manifest, section: str) -> dict[str, TensorRows]:
    """Return the tensors `SECTION.NAME` of a checkpoint by NAME.

    Raises:
        CheckpointError: the files are not what the manifest says.
    """
    contents = read_contents(folder, manifest)
    prefix = f"{section}."
    with readable(folder):
        return {
            name.removeprefix(prefix): _tensor(folder, name, entry, contents)
            for name, entry in contents.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }


def _tensor(
    folder: Path, name: str, entry: TensorStorageMetadata, contents: Metadata
) -> TensorRows:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    parts = [
        (tuple(chunk.offsets), find_chunk(folder, contents, name, number))
        for number, chunk in enumerate(entry.chunks)
    ]
    if not _covers(shape, [(start, part.shape) for start, part in parts]):
        raise CheckpointError(f"{folder}: the parts of {name} do not make it up")
    if len(parts) == 1:
        return parts[0][1]
    return ConcatenatedTensor(dtype, shape, tuple(sorted(parts, key=lambda part: part[0])))


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether boxes (start, sizes) cover a tensor, each element once."""
    for start, sizes in boxes:
        if len(start) != len(shape) or len(sizes) != len(shape):
            return False
        ends = zip(start, sizes, shape, strict=True)
        if any(begin < 0 or size < 0 or begin + size > full for begin, size, full in ends):
            return False
    full = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in full) != math.prod(shape):
        return False
    near: list[Box] = []  # only these can overlap: thousands of ranks cut a tensor into rows
    for box in sorted(full):
        near = [other for other in near if not shape or other[0][0] + other[1][0] > box[0][0]]
        if any(_overlap(box, other) for other in near):
            return False
        near.append(box)
    return True


def _overlap(one: Box, other: Box) -> bool:
    return all(
        a < b + width and b < a + size for a, size, b, width in zip(*one, *other, strict=True)
    )


def write_native(
    folder: Path,
    tensors: Mapping[str, TensorRows],
    forms: Mapping[str, Form],
    info: SaveInfo,
    advance: Advance,
    checks: Sequence[Callable[[], str]] = (),
) -> None:
    """Write a complete checkpoint into an empty folder; what is in it already is listed too.

    Args:
        tensors: by full name, such as "model.embed.weight".
        forms: the dtype and shape that each is written in.
        info: what the manifest says.
        checks: as for `write_all`.
    """
    beside = sorted(folder.iterdir())
    files = _divide(forms)
    results: list[WriteResult] = []
    work = []
    for number, names in enumerate(files):
        path, position, content = folder / f"__{number}_0.distcp", 0, list[Content]()
        for name in names:
            archive = Archive(forms[name])
            content += [archive.head, whole(tensors[name], forms[name][0], name), archive.tail]
            results.append(_result(name, forms[name], path.name, position, archive.bytes))
            position += archive.bytes
        create(path, position, b"")
        work.append(Extent(path, 0, content))
    hashes = write_all(work, advance, checks)
    sync([extent.file for extent in work] + beside)
    FileSystemWriter(folder).finish(_contents(forms), [results])
    entries = {
        extent.file.name: FileEntry(bytes=extent.file.stat().st_size, xxh3=hashed)
        for extent, hashed in zip(work, hashes, strict=True)
    }
    entries |= {path.name: file_entry(path) for path in [*beside, folder / CONTENTS]}
    _write_manifest(folder, info, forms, entries)


def _divide(forms: Mapping[str, Form]) -> list[list[str]]:
    """Return the names for each file, about equally large, so that all threads end together."""
    sizes = {name: nbytes(shape, dtype) for name, (dtype, shape) in forms.items()}
    count = max(1, min(MAX_FILES, len(forms), sum(sizes.values()) // FILE_BYTES))
    files: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        emptiest = filled.index(min(filled))
        files[emptiest].append(name)
        filled[emptiest] += sizes[name]
    return files


def _result(name: str, form: Form, file: str, offset: int, length: int) -> WriteResult:
    index = MetadataIndex(name, [0] * len(form[1]))
    return WriteResult(index, nbytes(form[1], form[0]), _StorageInfo(file, offset, length))


def _contents(forms: Mapping[str, Form]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(shape),
                chunks=[ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))],
            )
            for name, (dtype, shape) in forms.items()
        }
    )


def _write_manifest(
    folder: Path, info: SaveInfo, forms: Mapping[str, Form], files: dict[str, FileEntry]
) -> None:
    manifest = Manifest(
        **vars(replace(info, contents="weights")),
        tensors={
            name: {"shape": list(shape), "dtype": dtype_name(dtype)}
            for name, (dtype, shape) in forms.items()
        },
        files=files,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_manifest(folder, manifest)
    problems = check_listing(folder, manifest)
    if problems:
        raise CheckpointError(f"{folder}: {problems[0]}")
