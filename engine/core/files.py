"""Paths, and writing files so that a kill or a power failure costs nothing. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from io import BufferedReader
from pathlib import Path

from .errors import EnvironmentFault, Problem, RecipeError

_PATH_ERRORS = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC,
    errno.EDQUOT, errno.EIO, errno.ESTALE,
)  # fmt: skip
MAX_SMALL_BYTES = 2**24
"""largest size in bytes of a file that is read whole"""
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


def user_cache(folder: str, name: str, key: str) -> Path:
    """Return a folder for what can be made again.

    Args:
        folder: the folder that the recipe gives; empty: a folder of the user's cache.
        name: the folder's name below the user's cache of this program.
        key: the recipe's key for the folder, which messages name.

    Raises:
        EnvironmentFault: this user has no home folder.
        RecipeError: `folder` is in the home of a user who has none.
    """
    try:
        if folder:
            return Path(folder).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        if folder:
            raise RecipeError([Problem(f"no home folder for {folder!r}", key)]) from error
        raise EnvironmentFault("this user has no home folder", f"set {key}") from error
    return base / "trainer" / name


def make_private(folder: Path, key: str) -> None:
    """Create a folder whose files are run as code, or check that no other user can write there.

    Only its owner can then enter it (mode 0700).

    Args:
        folder: the folder.
        key: the recipe's key for the folder, which messages name.

    Raises:
        EnvironmentFault: the folder is another user's, or others could have written in it.
    """
    hint = f"give {key} a folder that is yours alone"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.stat()
        if state.st_uid != os.geteuid():
            raise EnvironmentFault(f"{folder} belongs to another user, and holds code", hint)
        if state.st_mode & 0o022 and any(folder.iterdir()):
            raise EnvironmentFault(
                f"others can write in {folder}, and it holds code that runs",
                f"delete it, or {hint}",
            )
        folder.chmod(0o700)
        # A sticky folder such as /tmp is safe: others cannot rename what is not theirs.
        for above in folder.resolve().parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise EnvironmentFault(
                    f"others can write in {above}, and so replace {folder}, which holds code", hint
                )
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentFault(f"{folder} cannot be used: {reason}", hint) from error


def atomic_write(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the whole new one, whatever happens.

    Raises:
        OSError: the folder is not writable or full; the old file stays.
    """
    # In the same folder, as a rename is atomic within one file system only; with the process's
    # number, as two processes may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # Synced before the rename: otherwise a power failure can leave the new name on an empty
        # file.
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def require_free(path: Path) -> None:
    """Refuse a path at which there is a file that a user may want to keep.

    Raises:
        RecipeError: the path holds a file.
    """
    if os.path.isfile(path):
        raise RecipeError(f"{path} is there already", "give another path, or --force")


def write_asked(path: Path, text: str, *, replace: bool = False, hint: str = "") -> None:
    """Write a file that a user asked for, and the folders above it.

    A link stays, and the file that it leads to is written. What is no regular file, such as
    /dev/null or a pipe, is written through.

    Args:
        replace: a file that is there may be replaced.
        hint: what to do when it cannot be written.

    Raises:
        RecipeError: a file is there already.
        EnvironmentFault: it cannot be written.
    """
    require_path(path)
    try:
        mode = path.stat().st_mode if os.path.exists(path) else stat.S_IFREG
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with open(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8") as file:
                file.write(text)
            return
        if not replace:
            require_free(path)
        # The rename would replace a link itself.
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, text)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", hint) from None


class UnusableFile(OSError):
    """A file that is not a regular file, or is larger than its purpose allows."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file of unknown origin; fifos and devices, which may never end, are refused.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    # O_NONBLOCK: opening a fifo must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # Asked of the open file: the path may lead to another one by now.
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UnusableFile(errno.EINVAL, "is not a regular file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int = MAX_SMALL_BYTES) -> bytes:
    """Read a regular file of unknown origin.

    Args:
        limit: bytes; no larger one is read.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        # The size is judged by what was read: a file may grow, and those of /proc say 0.
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UnusableFile(errno.EFBIG, f"is larger than {limit:,} bytes", os.fspath(path))
    return content


def require_regular(path: str | Path) -> None:
    """Check a file before a library opens it by its name, as `open_regular` does.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    open_regular(path).close()


def delete_folder(folder: Path) -> str:
    """Delete a folder and all that is in it, as far as that is possible; links are left.

    Returns:
        why the folder, or a part of it, is still there; empty if it is gone.
    """
    if why := undeletable(folder):
        return why
    failures: list[BaseException] = []
    # One file that cannot be deleted, such as `.nfs...`, does not keep the others' space taken.
    shutil.rmtree(folder, onerror=lambda _, __, raised: failures.append(raised[1]))
    return f"{folder} could not be deleted: {failures[0]}" if failures else ""


def undeletable(folder: Path) -> str:
    """Return why a folder must be left where it is; empty: it may be deleted."""
    # Links first, because `is_dir` follows them.
    if folder.is_symlink():
        return f"{folder} is left: it is a link, and what it leads to may be wanted"
    if not folder.is_dir():
        return f"{folder} is left: it is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is left: this user may not delete what is in it"
    return ""


def path_fault(error: OSError) -> EnvironmentFault | None:
    """Return what to tell a user whose path or disk is the cause; None: it is another error."""
    is_known = error.errno in _PATH_ERRORS or isinstance(error, UnusableFile)
    if not is_known or error.filename is None:
        return None
    return EnvironmentFault(
        f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}",
        "give another path, or look at the disk and at who may use it",
    )


def publish(unfinished: Path, final: Path) -> None:
    """Give a file or folder whose contents are synced its final name, durably.

    Raises:
        OSError: it cannot be renamed.
    """
    unfinished.rename(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure.

    Syncing a file makes its content durable, but not the entry of its folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
