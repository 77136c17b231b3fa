"""Space on the disk, and what the operating system means when it refuses."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import CheckpointError, TrainerError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: Path) -> int:
    """Return what may still be written to a folder's file system."""
    return shutil.disk_usage(folder).free


@contextmanager
def writing(folder: Path, needed: int) -> Iterator[None]:
    """Check that there is space for `needed` bytes, and explain what fails in the block.

    Raises:
        CheckpointError: the disk is full, the folder is gone, or writing is refused.
    """
    try:
        if needed > free_bytes(folder):
            raise OSError(errno.ENOSPC, "not enough space")
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise _explained(error, folder, needed) from error


def _explained(error: Exception, folder: Path, needed: int) -> CheckpointError:
    cause: BaseException | None = error  # torch's writers may wrap the system's reason
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if not folder.is_dir():
        return CheckpointError(
            f"{folder} is not there: it was removed, or this machine does not see it",
            "it must be on a file system that all ranks share",
        )
    if isinstance(cause, OSError) and cause.errno in FULL:
        numbers = f"{needed:,} bytes needed, " if needed else ""
        return CheckpointError(
            f"no space for a checkpoint: {numbers}{free_bytes(folder):,} free in {folder.parent}",
            "free some space, or write to another disk; a run keeps checkpoint.keep checkpoints",
        )
    return CheckpointError(f"cannot write to {folder}: {type(error).__name__}: {error}")
