"""What ends with a process, also by `kill -9`: locks, and processes that work for it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import sys
import time
from pathlib import Path

# What a file system says that knows no locks, or none of folders (NFS).
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL)
_held: dict[int, bool] = {}
"""the descriptors of locks; True: forked children hold the lock too"""


def _close_in_child() -> None:
    for descriptor in [number for number, inherit in _held.items() if not inherit]:
        unlock(descriptor)


# A lock belongs to the open file, which forked processes share until the last of them closes it.
# A forked data worker must not keep the lock of a trainer that was killed.
os.register_at_fork(after_in_child=_close_in_child)


def lock_file(path: Path, patience_seconds: float = 0.0, *, inherit: bool = False) -> int:
    """Lock a file, which is created if it is missing, and return its descriptor for `unlock`.

    The file's content stays, so that another process can read who holds the lock.

    Args:
        path: the file.
        patience_seconds: how long to wait for another process.
        inherit: True keeps the file locked until the children that are forked meanwhile have ended.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be written, is a link or no regular file, or there are no locks.
    """
    # Without O_TRUNC: a try that fails must not delete the name of the holder.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "is not a regular file", str(path))
        _take(descriptor, patience_seconds)
    except OSError:
        os.close(descriptor)
        raise
    _held[descriptor] = inherit
    return descriptor


def lock_folder(path: Path, patience_seconds: float = 0.0) -> int | None:
    """Lock a folder itself; None: its file system has no such locks.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _take(descriptor, patience_seconds)
    except OSError as error:
        os.close(descriptor)
        if is_unsupported(error):
            return None
        raise
    _held[descriptor] = False
    return descriptor


def share_lock(path: Path) -> int:
    """Hold a shared lock of a file or folder, and return the descriptor that holds it.

    It waits for a process that has the lock alone. The lock ends when all copies of the descriptor
    are closed, those of forked children included.

    Raises:
        OSError: the file cannot be read, or there are no locks.
    """
    return _lock_existing(path, fcntl.LOCK_SH)


def lock_existing(path: Path) -> int:
    """Lock a file or folder that exists, and return the descriptor; as `share_lock`, but alone.

    Raises:
        BlockingIOError: another process holds a lock, shared or not.
        OSError: the file cannot be read, or there are no locks.
    """
    return _lock_existing(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_existing(path: Path, kind: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file or folder.

    A shared lock is taken and given back at once, so a process that locks at that instant must
    try again.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A shared one, so that two processes that only look do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def unlock(descriptor: int) -> None:
    """Give a lock back; nothing happens if it is not held."""
    if descriptor in _held:
        del _held[descriptor]
        os.close(descriptor)


def is_unsupported(error: OSError) -> bool:
    """Return whether an error says that a file system has no locks."""
    return error.errno in _UNSUPPORTED


def _take(descriptor: int, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            # Tried again and again, because a blocking call has no time limit.
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End when the parent process ends, and ignore the signals that the parent handles.

    A scheduler signals every process of a job. An orphan would hold what it inherited, such as a
    lock.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes  # needed by workers alone, and slow to import

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this could be arranged
        os._exit(1)
