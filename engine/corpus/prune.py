"""What is in the cache of prepared sources, and how it is deleted. Torch-free."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.files import read_regular
from ..core.processes import lock_existing
from .cache import SOURCE, UNFINISHED
from .manifest import INDEX as TOKENS
from .records.record_manifest import INDEX as RECORDS

Kind = Literal["tokens", "records", "stream", "unfinished"]
_NAME = re.compile(r"\.?([\w.-]+?)(-records)?-[0-9a-f]{32}(\.unfinished|\.deleted)?")


@dataclass(frozen=True)
class CacheEntry:
    """A folder of the cache.

    Attributes:
        path: the folder.
        kind: what it holds; "unfinished": what an interrupted preparation left.
        source: the name of the source in recipes, and its path if that is known.
        bytes: the size of its files.
        last_used: when a process opened it last, in seconds since 1970.
    """

    path: Path
    kind: Kind
    source: str
    bytes: int
    last_used: float


def list_entries(cache: Path) -> list[CacheEntry]:
    """Return the folders of a cache, those first that were not used for the longest time.

    Folders that have other names or hold something else are no part of the cache.
    """
    return sorted(_find_entries(cache), key=lambda entry: entry.last_used)


def _find_entries(cache: Path) -> Iterator[CacheEntry]:
    for folder in [*cache.glob("*"), *cache.glob("streams/*")]:
        name = _NAME.fullmatch(folder.name)
        if name is None or folder.is_symlink() or not folder.is_dir():
            continue
        kind: Kind = "unfinished"
        if folder.parent != cache:
            kind = "stream"
        elif not name[3] and (folder / TOKENS).is_file():
            kind = "tokens"
        elif not name[3] and (folder / RECORDS).is_file():
            kind = "records"
        elif not name[3]:
            continue
        with suppress(OSError):  # another process deletes it
            sizes = [file.lstat().st_size for file in folder.rglob("*")]
            source = f"{name[1]} {_read_source(folder)}".rstrip()
            yield CacheEntry(folder, kind, source, sum(sizes), folder.stat().st_mtime)


def _read_source(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return read_regular(folder / SOURCE).decode(errors="replace")[:500]
    return ""


def choose_entries(
    entries: Sequence[CacheEntry], *, days: float | None = None, max_bytes: float | None = None
) -> list[CacheEntry]:
    """Return the entries to delete.

    Args:
        entries: those of a cache, as `list_entries` returns them.
        days: delete what was not used for so long; None: whatever its age.
        max_bytes: delete what was not used for the longest time until the rest is as small; None:
            delete whatever the size of the rest.
    """
    oldest = time.time() - (days or 0) * 24 * 3600
    chosen, left = [], sum(entry.bytes for entry in entries)
    for entry in entries:
        if entry.last_used <= oldest and (max_bytes is None or left > max_bytes):
            chosen.append(entry)
            left -= entry.bytes
    return chosen


def is_in_use(entry: CacheEntry) -> bool:
    """Return whether a process makes an entry or has it open."""
    with ExitStack() as stack:
        return not _lock(entry, stack)


def delete_entry(entry: CacheEntry) -> str:
    """Delete a folder of the cache unless a process uses it.

    Returns:
        why it is still there, or an empty text if it is gone.
    """
    with ExitStack() as stack:
        if not _lock(entry, stack):
            return f"{entry.path} is left: a process uses it"
        try:
            # Renamed first, so that its name never shows a part of it.
            hidden = entry.path.name.startswith(".")
            gone = entry.path.with_name(f".{entry.path.name}.deleted")
            shutil.rmtree(entry.path if hidden else entry.path.rename(gone))
        except OSError as error:
            return f"{entry.path} could not be deleted: {error.strerror}"
    return ""


def _lock(entry: CacheEntry, stack: ExitStack) -> bool:
    """Lock what processes lock that use an entry, and return whether none does."""
    name = entry.path.name.removesuffix(UNFINISHED)
    for path in (entry.path.with_name(f"{name}.lock"), entry.path / "lock", entry.path):
        try:
            stack.callback(os.close, lock_existing(path))
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True
