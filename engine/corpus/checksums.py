"""Verifies the checksums of a token store's files, once for each version of a file.

A record beside the tokens, or in the user's cache folder if the store is read-only, holds a line
for each file that was compared: its name, size, times and checksum. A file that changed since is
compared again. Lines are only appended, so that processes need no lock; a line that another writer
cut short matches no file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, EnvironmentFault
from .manifest import TokenFileEntry, hash_file, read_manifest

RECORD = ".compared"
MAX_RECORD_BYTES = 2**26
THREADS = 8
# How /proc names file systems that several machines see.
SHARED = {"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "9p", "afs", "wekafs"}
PREPARE_AGAIN = (
    "restore it from a copy, or delete the folder and prepare it again; "
    "of its cache a run does that by itself"
)

log = logging.getLogger(__name__)


class Share(NamedTuple):
    """The position of a process among those that divide the files of a store.

    Attributes:
        rank: the rank of the process among all processes.
        ranks: the number of all processes.
        local_rank: the rank of the process on its machine.
        local_ranks: the number of processes on the machine.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    def of(self, folder: Path, files: Sequence[str]) -> Sequence[str]:
        """Return the files that this process verifies.

        Processes of all machines divide the files of a shared file system; otherwise each machine
        has its own files, which its processes divide.
        """
        if is_shared(folder):
            return files[self.rank :: self.ranks]
        return files[self.local_rank :: self.local_ranks]


ALONE = Share()


def require_intact(
    folder: Path,
    cache: Path,
    share: Share = ALONE,
    files: Mapping[str, TokenFileEntry] | None = None,
) -> None:
    """Verify the checksums of files that were not verified before or that changed since.

    Args:
        folder: the folder of the store.
        cache: the folder of the record of verified files if the store is read-only.
        share: the position of this process among those that divide the files.
        files: the size and checksum of each file; None takes those of `tokens.json`.

    Raises:
        DataError: the content of a file does not match the checksum.
        EnvironmentFault: a file cannot be read.
    """
    files = read_manifest(folder).all_files if files is None else files
    in_cache = xxh3_128_hexdigest(os.fsencode(folder.resolve())) + RECORD
    records = (folder / RECORD, cache / in_cache)
    known = {line for record in records for line in _read_lines(record)}
    lines = {name: _describe(folder, name, files[name]) for name in share.of(folder, sorted(files))}
    new = [name for name, line in lines.items() if line not in known]
    if not new:
        return
    size = sum(files[name].bytes for name in new) / 1e9
    log.info("%s: comparing %d files (%.2f GB) with their checksums, once", folder, len(new), size)
    for name, entry in zip(new, _hash_files([folder / name for name in new]), strict=True):
        if entry != files[name]:
            raise DataError(f"{folder / name}: does not hold what was written", PREPARE_AGAIN)
        _append(records, lines[name])


def _hash_files(files: Sequence[Path]) -> Iterator[TokenFileEntry]:
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1, len(files)))
    try:
        yield from pool.map(hash_file, files)
    except OSError as error:
        raise EnvironmentFault(f"{error.filename}: {error.strerror}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _describe(folder: Path, name: str, entry: TokenFileEntry) -> str:
    try:
        status = (folder / name).stat()
    except OSError as error:
        raise EnvironmentFault(f"{folder / name}: {error.strerror}") from error
    # The time of the last change of the inode cannot be set: a copy never looks like the original.
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{name} {status.st_size} {times} {entry.xxh3}"


def _read_lines(record: Path) -> list[str]:
    """Return the lines of a record file, or no lines if the file cannot be read."""
    try:
        descriptor = os.open(record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(MAX_RECORD_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def _append(records: Sequence[Path], line: str) -> None:
    """Append a line to the first record file that can be written; if none can, do nothing."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    for record in records:
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(record, flags, 0o644)
            try:
                os.write(descriptor, f"{line}\n".encode())
            finally:
                os.close(descriptor)
            return
        except OSError as error:
            log.debug("%s: %s", record, error.strerror)


def is_shared(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether a folder is on a file system that is known to be shared between machines."""
    try:
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts.read_text(errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split(" ")[2:3] == [number]:
                return kind.split(" ")[0].removeprefix("fuse.") in SHARED
    except OSError:
        pass
    return False
