"""What a checkpoint says of itself: `manifest.json`, written last, with its own checksum.

The first line is the XXH3-128 of all bytes after it, so that any changed byte is seen:

    {"xxh3": "<32 hexadecimal digits>",
    "manifest": {...}}

The checksums detect accidents, not attackers.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..core.errors import CheckpointError
from ..core.files import open_regular

CONTENTS = ".metadata"
"""torch DCP's table of contents"""
FORMAT = 2
READABLE = (1, 2)
"""1: torch DCP files with a pickled table of contents, until 0.1; 2: safetensors and an index"""
MANIFEST = "manifest.json"
# 405 billion weights on 16,384 ranks need 2 MB: a hundred bytes a tensor of weights and of the
# optimizer's state, and a hundred bytes a file. Read, a manifest takes up to 30 times its size.
MAX_MANIFEST_BYTES = 2**25
DATA_SUFFIXES = (".safetensors", "index.json", ".distcp", ".metadata")
"""Files that hold tensors: one that the manifest does not list is from another save."""


class TensorEntry(TypedDict):
    """A tensor's global shape, and its dtype without `torch.`."""

    shape: list[int]
    dtype: str


class FileEntry(TypedDict):
    """A file's size and XXH3-128."""

    bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """What the run says of the state that it saves. Everything is plain, finite JSON."""

    __pydantic_config__ = ConfigDict(defer_build=True)

    step: int
    samples: int = 0
    world: int = 1
    mesh: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_hash: str = ""
    tokenizer: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    frozen: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    run_id: str = ""
    attempt: int = 0
    contents: Literal["full", "weights"] = "full"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest(SaveInfo):
    """A complete checkpoint: what the run said, every tensor and every file."""

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    saved_at: str
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(entry["bytes"] for entry in self.files.values())


MANIFEST_TYPE = TypeAdapter(Manifest)


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync `manifest.json`; the folder must not have one yet.

    Raises:
        ValueError: a number in it is not finite.
    """
    body = f'"manifest": {json.dumps(asdict(manifest), allow_nan=False)}}}\n'.encode()
    # "x": a manifest that is there already belongs to another save, and would be mixed with this.
    with open(folder / MANIFEST, "xb") as file:
        file.write(_first_line(body) + body)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder. Reads no other file.

    Raises:
        CheckpointError: there is none, it was changed, or a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            first_line, body = file.readline(100), file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a complete checkpoint: no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if len(body) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    if first_line != _first_line(body):
        raise CheckpointError(f"{path}: its checksum differs")
    try:
        content = json.loads(b"{" + body)["manifest"]
        if content["format"] not in READABLE:
            raise CheckpointError(
                f"{path}: format {content['format']}; this version reads formats 1 and 2"
            )
        manifest = MANIFEST_TYPE.validate_python(content)
    except ValidationError as error:
        where, reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise CheckpointError(f"{path}: {'.'.join(map(str, where))}: {reason}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not understood: {error}") from error
    # Names are joined to the folder later: "../x" would leave it.
    for name in manifest.files:
        if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
            raise CheckpointError(f"{path}: {name!r} is not a plain file name")
    if "tokens" in manifest.extra:  # what the count was called when tokens alone were counted
        manifest.extra["count"] = manifest.extra.pop("tokens")
    return manifest


def verify(folder: Path, hashes: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint; an empty list: it is complete and unchanged.

    Args:
        hashes: compare contents too, not only names and sizes.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [error.message]
    problems = check_listing(folder, manifest)
    return problems or (check_hashes(folder, manifest.files) if hashes else [])


def check_listing(folder: Path, manifest: Manifest) -> list[str]:
    """Compare the folder's name, its files and their sizes with the manifest."""
    problems = []
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named and int(named[1]) != manifest.step:
        problems.append(f"{MANIFEST} is of step {manifest.step}")
    for name, entry in manifest.files.items():
        try:
            # Not `stat`: a link could lead to a file that changes after it was hashed.
            status = os.lstat(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{name} is not a regular file")
        elif status.st_size != entry["bytes"]:
            problems.append(f"{name} has {status.st_size} bytes, not {entry['bytes']}")
    try:
        unknown = set(os.listdir(folder)) - set(manifest.files)
    except OSError as error:
        return [f"{folder} cannot be read: {error.strerror}"]
    problems += [
        f"{name} is not in the {MANIFEST}"
        for name in sorted(unknown)
        if name.endswith(DATA_SUFFIXES)
    ]
    return problems


def check_hashes(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Compare the contents of the files with their hashes, several at a time."""
    # Threads are enough: reading releases the interpreter's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _check_hash(folder / name, files[name]["xxh3"]), files)
        return [problem for problem in found if problem]


def hash_file(path: Path) -> str:
    """Return the XXH3-128 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        buffer = memoryview(bytearray(2**22))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def file_entry(path: Path) -> FileEntry:
    """Return the size and the hash of a file."""
    return {"bytes": path.stat().st_size, "xxh3": hash_file(path)}


def _check_hash(path: Path, expected: str) -> str:
    try:
        same = hash_file(path) == expected
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return "" if same else f"{path.name} does not hold what was saved: its checksum differs"


def _first_line(body: bytes) -> bytes:
    return b'{"xxh3": "%s",\n' % xxhash.xxh3_128_hexdigest(body).encode()
