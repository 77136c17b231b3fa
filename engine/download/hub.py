"""Downloads models from the Hugging Face hub into its own cache, or into a folder. Torch-free.

The cache is the one of `huggingface_hub` (HF_HOME), shared with other programs. What is downloaded
here is compared with the hub's checksums: SHA-256 of large files, git's SHA-1 of small ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..core.errors import DataError, EnvironmentFault
from ..core.files import atomic_write, open_regular, read_regular, user_cache
from ..core.processes import lock_file, unlock
from ..core.registry import require_package
from .hub_errors import explain_hub_errors
from .hub_ids import HubId, parse_hub_id

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "tokenizer.model", "*.tiktoken",
)  # fmt: skip
MODEL_FILES = (*TOKENIZER_FILES, "*.json", "*.safetensors", "*.txt", "LICENSE*")
"""what this program reads of a model, and its licence; in the repository's top folder alone"""
HUB_SECONDS = 20.0
BLOCK_BYTES = 2**24

log = logging.getLogger(__name__)


class HubFile(NamedTuple):
    """A file of a model, as the hub describes it."""

    name: str
    size: int
    sha256: str
    """of a file in Git LFS; else empty"""
    blob: str
    """git's SHA-1 of the file's content, or of its LFS pointer"""


class Download(NamedTuple):
    """A downloaded model: its folder, its id with the commit, and its files."""

    folder: Path
    id: HubId
    files: list[HubFile]


def resolve_folder(text: str | Path, patterns: Collection[str] = MODEL_FILES) -> Path:
    """Return a path as it is, or download the model that an id names and return its folder.

    Args:
        text: a path, or an id such as "Qwen/Qwen3-0.6B" or "Qwen/Qwen3-0.6B@COMMIT".
        patterns: globs of the files that are needed.

    Raises:
        EnvironmentFault, DataError: see `download`.
    """
    found = parse_hub_id(text)
    return download(found, patterns).folder if found else Path(text)


def resolve_tokenizer(text: str) -> Path:
    """Return the absolute path of a tokenizer's file or folder, which an id of the hub may name."""
    return resolve_folder(text, TOKENIZER_FILES).expanduser().absolute()


def download(
    wanted: HubId,
    patterns: Collection[str] = MODEL_FILES,
    to: Path | None = None,
    *,
    check_all: bool = False,
) -> Download:
    """Download the files of a model that are not there yet, or that differ from the hub's.

    An interrupted download resumes where it stopped. Of processes that need the same files, one
    downloads them, and the others wait.

    Args:
        wanted: the model and its revision.
        patterns: globs of the names of the files.
        to: a folder for the files; None takes the hub's cache.
        check_all: compare the checksums of files that are there already too. Without it, their
            sizes are compared.

    Raises:
        EnvironmentFault: the hub cannot be reached or refuses, and the cache lacks a file; or the
            hub's library is not installed.
        DataError: there is no such model or file, or what came has another checksum.
    """
    hub = _import_hub(wanted)
    commit = wanted.revision if wanted.is_pinned else _find_commit(hub, wanted)
    pinned = wanted.pin(commit)
    listed = _list_files(hub, pinned, is_needed=check_all or to is not None)
    if listed is None:
        return Download(_cache(hub, pinned) / "snapshots" / commit, pinned, [])
    files = [file for file in listed if _is_wanted(file.name, patterns)]
    if not files:
        names = ", ".join(file.name for file in listed[:20])
        raise DataError(f"{pinned}: no file is {' or '.join(patterns)}; there is: {names}"[:600])
    with _lock(pinned):
        folders = [_fetch(hub, pinned, file, to, check=check_all) for file in files]
    return Download(to or folders[0], pinned, files)


def _is_wanted(name: str, patterns: Collection[str]) -> bool:
    """Return whether a file is wanted: one in a folder needs a pattern with a folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"the hub lists a file {name!r}, which leads out of the folder")
    depth = name.count("/")
    return any(fnmatchcase(name, each) and (not depth or "/" in each) for each in patterns)


def _fetch(hub: Any, pinned: HubId, file: HubFile, to: Path | None, *, check: bool) -> Path:
    """Download a file unless its content is there; return the folder of the model."""
    place = {"repo_id": pinned.repo, "filename": file.name, "revision": pinned.revision}
    found = hub.try_to_load_from_cache(**place) if to is None else to / file.name
    path = Path(found) if isinstance(found, str | Path) and os.path.exists(found) else None
    wrong = _compare(path, file, size_alone=not check) if path else ""
    if wrong:
        log.warning("%s %s: it is downloaded again", path, wrong)
    if path is None or wrong:
        if not sys.stderr.isatty():
            hub.utils.disable_progress_bars()
        with explain_hub_errors(pinned):
            # Without force, the hub's library may take a file that is there for the right one.
            done = hub.hf_hub_download(
                **place, local_dir=to, etag_timeout=HUB_SECONDS, force_download=path is not None
            )
        path = Path(done)
        if wrong := _compare(path, file):
            if to is None:  # the blob of the cache, to which the snapshot's name is a link
                Path(os.path.realpath(path)).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise DataError(
                f"{pinned}: {file.name} {wrong}; it was deleted",
                "run the same again, which downloads it again",
            )
    return path.parents[len(PurePosixPath(file.name).parts) - 1]


def _compare(path: Path, file: HubFile, *, size_alone: bool = False) -> str:
    """Return how a file's size and checksum differ from what the hub says, or an empty text."""
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != file.size:
            return f"has {size:,} bytes, and {file.size:,} on the hub"
        if size_alone:
            return ""
        # Source of the prefix: git's object format, https://git-scm.com/book/en/v2/Git-Internals
        digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size)
        while block := opened.read(BLOCK_BYTES):
            digest.update(block)
    expected = file.sha256 or file.blob
    if digest.hexdigest() == expected:
        return ""
    return f"has the {digest.name} {digest.hexdigest()}, and {expected} on the hub"


def _find_commit(hub: Any, wanted: HubId) -> str:
    """Return the commit of a tag or branch; without the hub, the newest one that is known here."""
    last = _last_record(wanted)
    try:
        with explain_hub_errors(wanted):
            info = hub.HfApi().model_info(
                wanted.repo, revision=wanted.revision or None, timeout=HUB_SECONDS
            )
        with suppress(OSError):
            atomic_write(last, str(info.sha))
        return str(info.sha)
    except EnvironmentFault:
        if commit := _find_last_commit(hub, wanted):
            log.warning("%s is taken from the cache: the hub cannot be reached", wanted.pin(commit))
            return commit
        raise


def _last_record(wanted: HubId) -> Path:
    return _record(wanted.pin(wanted.revision or "main"), "commit")


def _find_last_commit(hub: Any, wanted: HubId) -> str:
    """Return the commit that a revision was when the hub last answered; empty if it never did."""
    for file in (_last_record(wanted), _cache(hub, wanted) / "refs" / (wanted.revision or "main")):
        with suppress(OSError, ValueError):
            return read_regular(file).decode().strip()
    return ""


def _import_hub(wanted: HubId) -> Any:
    """Return the package of the hub; its parts are imported by name before they are attributes."""
    user = f"{wanted.repo} of the Hugging Face hub"
    for part in ("constants", "utils"):
        require_package(f"huggingface_hub.{part}", user, "hf")
    return require_package("huggingface_hub", user, "hf")


def is_cached(wanted: HubId, patterns: Collection[str] = MODEL_FILES) -> bool:
    """Return whether a run without a network finds the files of a model in the cache.

    Raises:
        EnvironmentFault: the hub's library is not installed.
    """
    hub = _import_hub(wanted)
    commit = wanted.revision if wanted.is_pinned else _find_last_commit(hub, wanted)
    pinned = wanted.pin(commit)
    try:
        listed = [HubFile(*each).name for each in json.loads(read_regular(_record(pinned, "json")))]
    except (OSError, ValueError, TypeError):
        return bool(commit) and (_cache(hub, pinned) / "snapshots" / commit).is_dir()
    names = [name for name in listed if _is_wanted(name, patterns)]
    return all(
        isinstance(hub.try_to_load_from_cache(pinned.repo, name, revision=commit), str)
        for name in names
    )


def _list_files(hub: Any, pinned: HubId, *, is_needed: bool) -> list[HubFile] | None:
    """Return the files of a commit; None: the hub cannot be reached, and the cache has a copy.

    The list is kept, because a commit never changes.

    Args:
        hub: the hub's library.
        pinned: the model and its commit.
        is_needed: whether a copy in the cache without a list is no substitute.
    """
    kept = _record(pinned, "json")
    with suppress(OSError, ValueError, TypeError):
        return [HubFile(*each) for each in json.loads(read_regular(kept))]
    try:
        with explain_hub_errors(pinned):
            info = hub.HfApi().model_info(
                pinned.repo, revision=pinned.revision, timeout=HUB_SECONDS, files_metadata=True
            )
    except EnvironmentFault:
        if not is_needed and (_cache(hub, pinned) / "snapshots" / pinned.revision).is_dir():
            return None
        raise
    files = [
        HubFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "", each.blob_id)
        for each in info.siblings
    ]
    with suppress(OSError):
        atomic_write(kept, json.dumps(files))
    return files


def _cache(hub: Any, wanted: HubId) -> Path:
    """Return the folder of a model in the hub's cache."""
    return Path(hub.constants.HF_HUB_CACHE, f"models--{wanted.repo.replace('/', '--')}")


def _record(pinned: HubId, suffix: str) -> Path:
    """Return a file of the user's cache that belongs to a revision."""
    folder = user_cache("", "hub", "XDG_CACHE_HOME")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{folder} cannot be used: {error.strerror}"
        raise EnvironmentFault(message, "set XDG_CACHE_HOME to a folder for caches") from error
    return folder / f"{pinned}.{suffix}".replace("/", "--")


@contextmanager
def _lock(pinned: HubId) -> Iterator[None]:
    descriptor = lock_file(_record(pinned, "lock"), math.inf)
    try:
        yield
    finally:
        unlock(descriptor)


def describe_files(files: Sequence[HubFile]) -> str:
    """Return the number of files and their size in words."""
    total = sum(file.size for file in files)
    size = f"{total / 1e9:.2f} GB" if total >= 1e8 else f"{total / 1e6:.2f} MB"
    return f"{len(files)} files, {size}"
