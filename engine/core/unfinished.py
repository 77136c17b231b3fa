"""Files and folders that get their name when they are complete. Torch-free.

What is written for `DST` lies in a folder `.tmp-DST-...` beside it, whose `lock` file is held while
its writer lives: a later command can tell what a killed one left, and delete it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from .errors import CheckpointError, EnvironmentFault, RecipeError
from .files import delete_folder, publish, sync_folder
from .processes import is_locked, lock_file, unlock

LOCK = "lock"
_LEFTOVER = re.compile(r"\.tmp-(.+)-[0-9a-f]{8}")


class Unfinished:
    """A file or folder that is being written under `path`, in a temporary folder.

    Raises:
        RecipeError: the target exists.
        EnvironmentFault: nothing can be written in its folder.
    """

    def __init__(self, target: Path) -> None:
        refuse_existing(target)
        self.target = target
        clear_unfinished(target.parent, [target.name])
        folder = target.with_name(f".tmp-{target.name}-{os.urandom(4).hex()}")
        self.path = folder / target.name
        """where to write"""
        self._lock: int | None = None
        try:
            folder.mkdir(parents=True)
            with contextlib.suppress(OSError):  # without locks, what a kill leaves stays
                self._lock = lock_file(folder / LOCK)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write to {target.parent}: {error.strerror}", "give another folder"
            ) from error

    def publish(self) -> None:
        """Give the synced file or folder its final name, durably.

        Raises:
            CheckpointError: the target appeared meanwhile.
        """
        if self.path.is_dir():
            sync_folder(self.path)
        # A rename would replace a file, or an empty folder, without a word.
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} appeared meanwhile: not replaced")
        publish(self.path, self.target)
        self.discard()

    def discard(self) -> None:
        """Remove what was begun and not published."""
        delete_folder(self.path.parent)
        # Last: the lock tells other commands to leave the folder alone.
        if self._lock is not None:
            unlock(self._lock)


def refuse_existing(target: Path) -> None:
    """Check that a name is free.

    Raises:
        RecipeError: the name is taken, or cannot be used.
    """
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise RecipeError(f"{target} cannot be used: {error.strerror}") from error
    raise RecipeError(f"{target} exists: not replaced", "remove it, or give another name")


def clear_unfinished(folder: Path, names: Collection[str]) -> list[str]:
    """Delete what killed writers left of targets of these names in a folder.

    Returns:
        a sentence for each folder that could not be deleted.
    """
    try:
        found = [each for each in os.listdir(folder) if _LEFTOVER.fullmatch(each)]
    except OSError:
        return []
    reasons = []
    for each in found:
        leftover = _LEFTOVER.fullmatch(each)
        if leftover and leftover[1] in names and not is_locked(folder / each / LOCK):
            reasons.append(delete_folder(folder / each))
    return [reason for reason in reasons if reason]
