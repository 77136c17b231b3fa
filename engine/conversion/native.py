"""Reads and writes our native checkpoints for conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ..checkpoint.box import Box
from ..checkpoint.chunks import (
    DTYPES,
    INDEX,
    LocalChunk,
    file_name,
    lay_out_chunks,
    read_chunks,
    tensor_entries,
    write_index,
)
from ..checkpoint.manifest import (
    FileEntry,
    Manifest,
    SaveInfo,
    check_listing,
    file_entry,
    write_manifest,
)
from ..checkpoint.tensors import ConcatenatedTensor, TensorRows, TensorSpec
from ..core.errors import CheckpointError
from .writing import Advance, Extent, create_file, sync, whole_slice, write_all

FILE_BYTES = 2**28
"""target size of a file: one thread writes and hashes a file, so several files use all cores"""
MAX_FILES = 64


def read_section(folder: Path, manifest: Manifest, section: str) -> dict[str, TensorRows]:
    """Return the tensors of one section of a checkpoint, without the section in their names.

    Args:
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        section: the first component of the tensors' names, such as "model" or "ema".

    Raises:
        CheckpointError: the files do not match the manifest.
    """
    prefix = f"{section}."
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    tensors: dict[str, TensorRows] = {}
    for name, chunks in read_chunks(folder, manifest, names).items():
        entry = manifest.tensors[name]
        tensors[name.removeprefix(prefix)] = (
            chunks[0].tensor
            if len(chunks) == 1
            else ConcatenatedTensor(DTYPES[entry["dtype"]], tuple(entry["shape"]), tuple(chunks))
        )
    return tensors


def write_native(
    folder: Path,
    tensors: Mapping[str, TensorRows],
    forms: Mapping[str, TensorSpec],
    info: SaveInfo,
    advance: Advance,
    checks: Sequence[Callable[[], str]] = (),
    contents: Literal["full", "weights"] = "weights",
) -> None:
    """Write a complete checkpoint into a folder without a checkpoint.

    Files that are in the folder already, such as the tokenizer's, are listed in the manifest too.

    Args:
        folder: an existing folder.
        tensors: the tensors by full name, such as "model.embed.weight".
        forms: the dtype and shape in which each tensor is written.
        info: step, recipe and versions for the manifest.
        advance: called with the number of bytes of each block that was written.
        checks: functions that raise if the source is damaged, run beside the writes.
        contents: "full" if a run can resume from the tensors.

    Raises:
        CheckpointError: the files that were written do not match the manifest.
    """
    beside = sorted(folder.iterdir())
    files = _divide(forms)
    work = []
    for number, chunks in enumerate(files):
        path, layout = folder / file_name(number), lay_out_chunks(chunks)
        create_file(path, layout.size)
        content = [whole_slice(tensors[name], forms[name][0], name) for name in layout.offsets]
        work.append(Extent(path, 0, [layout.head, *content]))
    hashes = write_all(work, advance, checks)
    sync([extent.file for extent in work] + beside)
    entries = {INDEX: write_index(folder, files)}
    for extent, hashed in zip(work, hashes, strict=True):
        entries[extent.file.name] = FileEntry(bytes=extent.file.stat().st_size, xxh3=hashed)
    manifest = Manifest(
        **vars(replace(info, contents=contents)),
        tensors=tensor_entries(files),
        files=entries | {path.name: file_entry(path) for path in beside},
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_manifest(folder, manifest)
    problems = check_listing(folder, manifest)
    if problems:
        raise CheckpointError(f"{folder}: {problems[0]}")


def _divide(forms: Mapping[str, TensorSpec]) -> list[list[LocalChunk]]:
    """Divide the tensors over files of about equal size, so that all threads end together."""
    whole_tensors = [
        LocalChunk(name, dtype, shape, Box((0,) * len(shape), shape))
        for name, (dtype, shape) in forms.items()
    ]
    total = sum(chunk.bytes for chunk in whole_tensors)
    count = max(1, min(MAX_FILES, len(forms), total // FILE_BYTES))
    files: list[list[LocalChunk]] = [[] for _ in range(count)]
    filled = [0] * count
    # Largest first, each into the emptiest file (greedy bin packing).
    for chunk in sorted(whole_tensors, key=lambda chunk: -chunk.bytes):
        emptiest = filled.index(min(filled))
        files[emptiest].append(chunk)
        filled[emptiest] += chunk.bytes
    return files
