"""An index made to do harm, with checksums that are right, is refused before any tensor is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.limits import limited
from trainer.engine.checkpoint.chunks import INDEX, MAX_INDEX_BYTES
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.checkpoint.reader import load_state, read_tensors
from trainer.engine.core.errors import CheckpointError

from .states import blank, differing, save_steps, seal

NAME = "model.short"  # of shape [2, 5]


def change_index(folder: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))
    seal(folder)


def parts(*new: Any) -> Callable[[Any], Any]:
    """Give a tensor other parts."""
    return lambda index: index["chunks"].update({NAME: list(new)})


INDEXES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a file elsewhere": (
        lambda index: index.update(files=["../step-00000001/shard-00000.safetensors"]),
        "points to '../step-00000001/shard-00000.safetensors'",
    ),
    "an absolute path": (lambda index: index.update(files=["/etc/hostname"]), "points to '/etc"),
    "a file that the manifest lacks": (
        lambda index: index["files"].append("other.safetensors"),
        "points to 'other.safetensors'",
    ),
    "no such file number": (parts([7, 0, [0, 0], [2, 5]]), "outside of its file"),
    "a negative file number": (parts([-1, 0, [0, 0], [2, 5]]), "greater than or equal to 0"),
    "beyond the end": (parts([0, 2**50, [0, 0], [2, 5]]), "outside of its file"),
    "a negative offset": (parts([0, -8, [0, 0], [2, 5]]), "greater than or equal to 0"),
    "an offset that is no integer": (parts([0, 1.0, [0, 0], [2, 5]]), "valid integer"),
    "a number of 400 digits": (parts([0, 10**400, [0, 0], [2, 5]]), INDEX),
    "no parts": (parts(), "the parts of model.short do not make it up"),
    "half of it": (parts([0, 0, [0, 0], [1, 5]]), "do not make it up"),
    "parts that overlap": (
        parts([0, 0, [0, 0], [1, 5]], [0, 0, [0, 0], [1, 5]]),
        "do not make it up",
    ),
    "other dimensions": (parts([0, 0, [0], [10]]), "do not make it up"),
    "a part outside of the tensor": (parts([0, 0, [1, 0], [2, 5]]), "do not make it up"),
    "another tensor": (
        lambda index: index["chunks"].update({"model.x": []}),
        "lists other tensors than the manifest",
    ),
    "a tensor that is missing": (lambda index: index["chunks"].pop(NAME), "lists other tensors"),
    "no files": (lambda index: index.pop("files"), "files: Field required"),
    "no object": (lambda index: index.update(chunks=[]), "chunks"),
}


@pytest.mark.parametrize("case", list(INDEXES))
def test_a_hostile_index_is_refused(tmp_path: Path, case: str) -> None:
    change, reason = INDEXES[case]
    save_steps(tmp_path, 1, 2)
    folder = tmp_path / "step-00000002"
    change_index(folder, change)
    found, loaded = find_checkpoint(folder), blank()
    with pytest.raises(CheckpointError) as raised:
        load_state(found.path, found.manifest, loaded, None)
    assert reason in raised.value.message
    assert all(bool((tensor == -1).all()) for tensor in loaded.values()), "nothing was read"


@pytest.mark.parametrize("content", [b"", b"[" * 10**5, b"{", b"[]", b'"', b"\xff" * 9, b"NaN"])
def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    save_steps(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    (folder / INDEX).write_bytes(content)
    seal(folder)
    with pytest.raises(CheckpointError, match=INDEX):
        read_tensors(folder, read_manifest(folder), blank())


def test_an_index_larger_than_the_manifest_tells_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    (folder / INDEX).write_bytes(b"[" + b"[]," * 2**20 + b"[]]")
    seal(folder)
    with limited(), pytest.raises(CheckpointError, match=r"has more than \d+ bytes"):
        read_tensors(folder, read_manifest(folder), blank())


@pytest.mark.matrix
def test_the_largest_index_that_is_read_takes_bounded_memory(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    for one in (b"[],", b"{},", b"[0,1000,[0,0],[1,1]],", b"1000,"):
        count = (MAX_INDEX_BYTES - 1000) // len(one)
        (folder / INDEX).write_bytes(
            b'{"files": [], "chunks": {"a": [' + one * count + one[:-1] + b"]}}"
        )
        seal(folder, many_files)
        with limited(4000, cpu_seconds=120), pytest.raises(CheckpointError):
            read_tensors(folder, read_manifest(folder), blank())


def many_files(manifest: dict[str, Any]) -> None:
    """Let a manifest list so many files that the largest index is read."""
    for number in range(2**17):
        manifest["files"][f"f{number}"] = {"bytes": 0, "xxh3": ""}


def test_an_index_that_says_the_same_in_other_words_is_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)

    def divide(index: Any) -> None:
        number, offset, _, _ = index["chunks"][NAME][0]
        parts([number, offset + 20, [1, 0], [1, 5]], [number, offset, [0, 0], [1, 5]])(index)

    change_index(tmp_path / "step-00000001", divide)
    assert differing(find_checkpoint(tmp_path), 1) == []
