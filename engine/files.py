"""Paths, and writing files so that a kill or a power failure costs nothing. Torch-free."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .errors import EnvironmentFault, RecipeError

# `Path` makes one slash of two: an address is known by either. A drive's letter is no scheme.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def address_problem(path: str | Path) -> str:
    """Return why a path such as `s3://bucket/runs` cannot be used; empty: it is no address.

    The system would take it for a relative path, and make a folder called `s3:`.
    """
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if not scheme:
        return ""
    return (
        f'"{scheme[1]}://{text[scheme.end() :]}" is an address, not a path: object stores are not '
        "available yet; give a path of a local or mounted file system"
    )


def require_path(path: str | Path) -> None:
    """Refuse an address where a path is expected.

    Raises:
        RecipeError: it has a scheme, such as `s3://` or `file://`.
    """
    if problem := address_problem(path):
        raise RecipeError(problem)


def atomic_write(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the whole new one, whatever happens.

    Raises:
        OSError: the folder is not writable or full; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_asked(path: Path, text: str, hint: str = "") -> None:
    """Write a file that a user asked for, and the folders above it.

    Raises:
        EnvironmentFault: it cannot be written; `hint` says what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", hint) from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
