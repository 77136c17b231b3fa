"""The cache of prepared sources: its folder, and locks so that one process makes what many need."""

from __future__ import annotations

import logging
import math
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ..core.errors import DataError, EnvironmentFault, RunInUse
from ..core.files import atomic_write, user_cache
from ..core.processes import is_locked, lock_file, share_lock, unlock

SOURCE, UNFINISHED = ".source", ".unfinished"
"""a file that says where the source is, and the ending of a working folder's name"""
Store = TypeVar("Store")

log = logging.getLogger(__name__)


def default_cache() -> Path:
    """Return the user's cache folder for tokenised sources."""
    return cache_folder("")


def cache_folder(folder: str) -> Path:
    """Return the folder of the cache of tokenised sources.

    Args:
        folder: `data.cache_dir` of the recipe; empty: in the user's cache.
    """
    return user_cache(folder, "tokens", "data.cache_dir")


def open_or_make(
    folder: Path, open_store: Callable[[], Store], make: Callable[[], None], source: str = ""
) -> Store:
    """Return a store of the cache, and make it first if needed.

    If several processes need the same store, one makes it and the others wait for the lock. An
    incomplete folder is made again. As long as a store is in memory, its folder has a shared lock.

    Args:
        folder: the folder of the store.
        open_store: opens it, or raises DataError if it is missing or incomplete.
        make: writes the folder.
        source: where the source is, for people who look into the cache.

    Raises:
        EnvironmentFault: the cache cannot be written.
    """
    store = _open_or_make(folder, open_store, make, source)
    with suppress(OSError):  # a read-only cache is pruned by nobody
        weakref.finalize(store, os.close, share_lock(folder))
        os.utime(folder)
    return store


def _open_or_make(
    folder: Path, open_store: Callable[[], Store], make: Callable[[], None], source: str
) -> Store:
    if not unfinished_folder(folder).exists():
        with suppress(DataError):
            return open_store()
    cache = folder.parent
    try:
        lock = cache / f"{folder.name}.lock"
        if is_locked(lock):
            log.info("waiting for another process to tokenise %s", folder.name)
        with hold_lock(lock, math.inf):
            with suppress(DataError):
                store = open_store()
                shutil.rmtree(unfinished_folder(folder), ignore_errors=True)
                return store
            shutil.rmtree(folder, ignore_errors=True)
            make()
            atomic_write(folder / SOURCE, source)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {cache}: {error.strerror}",
            "set data.cache_dir to a folder that is writable and has room",
        ) from error
    return open_store()


def unfinished_folder(folder: Path) -> Path:
    """Return the working folder of a preparation until it is complete."""
    return folder.parent / f"{folder.name}{UNFINISHED}"


@contextmanager
def hold_lock(file: Path, patience_seconds: float) -> Iterator[None]:
    """Hold a lock, which worker processes inherit, so that it is held until they end too.

    Raises:
        RunInUse: another process holds the lock for longer than the patience.
        OSError: the lock cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = lock_file(file, patience_seconds, inherit=True)
    except BlockingIOError as error:
        raise RunInUse(f"{file}: another process makes this") from error
    try:
        if not (file.exists() and os.path.samefile(file, descriptor)):  # its holder removed it
            raise RunInUse(f"{file}: another process made this just now", "try again")
        yield
    finally:
        unlock(descriptor)


def discard_other_inputs(work: Path, inputs: str) -> None:
    """Empty the working folder unless it belongs to the same inputs."""
    plan = work / "inputs"
    if work.exists() and not (plan.is_file() and plan.read_text(errors="replace") == inputs):
        log.info("%s is of other documents or settings: starting again", work)
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    atomic_write(plan, inputs)
