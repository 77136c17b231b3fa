"""Names in the checkpoints folder, and how folders come and go: always by a rename.

`step-00000100` is complete. Others are on their way: `.tmp-` is being written, `.old-` was replaced
by a later save of the same step, `.del-` is being deleted. `abandoned-step-...` lies beyond the
step from which the run resumed, so it must not be resumed from; it stays until pruned by hand.
`best` is a link to the checkpoint with the best evaluation, `latest` to the newest one.

What cannot be deleted (a link to a checkpoint on another disk, a file that is still open, another
owner's folder) is left where it is, and one warning says so: it never stops a run.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from functools import cache
from pathlib import Path

from ..core.errors import CheckpointError
from ..core.files import delete_folder, sync_folder, undeletable
from .manifest import folder_name, verify

STEP = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"\.(tmp|old|del)-(step-\d{8,})-[0-9a-f]{8}")
BEST, LATEST = "best", "latest"
ABANDONED = re.compile(r"abandoned-step-\d{8,}-[0-9a-f]{8}")

log = logging.getLogger(__name__)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, intact or not, oldest step first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return sorted(_list_named(folder, STEP), key=parse_step)


def list_abandoned(folder: Path) -> list[Path]:
    """Return the checkpoints beyond the step from which the run resumed.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return sorted(_list_named(folder, ABANDONED))


def _list_named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not os.path.isdir(folder):  # no error of a name that cannot be one
        return []
    try:
        return [folder / name for name in os.listdir(folder) if pattern.fullmatch(name)]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error


def parse_step(path: Path) -> int:
    """Return the step that a checkpoint folder's name says."""
    return int(path.name.removeprefix("step-"))


def make_temporary_name(step: int) -> str:
    """Return a fresh name to write a checkpoint under."""
    return f".tmp-{folder_name(step)}-{secrets.token_hex(4)}"


def publish(temporary: Path, step: int) -> Path:
    """Give a complete checkpoint its final name, durably; it replaces one of the same step.

    Checkpoints of later steps are damaged or from before a rollback: they are renamed and stay.
    """
    folder = temporary.parent
    final = folder / folder_name(step)
    replaced = None
    if final.is_symlink():
        final.unlink()  # the checkpoint that it leads to stays
    elif final.exists():
        replaced = final.rename(_mark(final, ".old-"))
    temporary.rename(final)  # atomic: readers see all of it or nothing
    abandon_beyond(folder, step)
    if replaced and (why := remove(replaced)):
        warn_once(why)
    return final


def abandon_beyond(folder: Path, step: int) -> None:
    """Rename the checkpoints of later steps, so that no start resumes from them."""
    for path in list_checkpoints(folder):
        if parse_step(path) > step:
            path.rename(_mark(path, "abandoned-"))
    sync_folder(folder)  # a rename is durable only once its folder is synced


def list_prunable(folder: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Return all checkpoints but the `keep` newest, the milestones and the one of `best`.

    Milestones are the checkpoints whose step is a multiple of `keep_every`, unless that is 0.

    A checkpoint whose files or sizes are wrong does not count among the newest, and is returned
    only if it is older than all that count. Without a good checkpoint, none is returned.
    """
    # Hashes would read every byte at each save; sizes find what an interrupted copy leaves.
    good = [path for path in list_checkpoints(folder) if not verify(path, hashes=False)]
    oldest_kept = parse_step(good[-keep:][0]) if good else 0
    old = [path for path in list_checkpoints(folder) if parse_step(path) < oldest_kept]
    milestones = {path for path in old if keep_every and parse_step(path) % keep_every == 0}
    return [path for path in old if path not in {*milestones, read_best_alias(folder)}]


def prune(folder: Path, keep: int, keep_every: int = 0, start: str = "") -> None:
    """Delete what `list_prunable` returns, and warn about what cannot be deleted.

    Args:
        folder: with the checkpoints.
        keep: see `list_prunable`.
        keep_every: see `list_prunable`.
        start: path of a checkpoint that stays.
    """
    for path in list_prunable(folder, keep, keep_every):
        is_start = os.path.realpath(path) == os.path.realpath(start)
        if not is_start and (why := remove(path)):
            warn_once(why)


def read_best_alias(folder: Path) -> Path | None:
    """Return the checkpoint that the alias `best` points to; None: there is no such alias."""
    return _read_alias(folder, BEST)


def _read_alias(folder: Path, name: str) -> Path | None:
    try:
        target = os.readlink(folder / name)
    except OSError:
        return None
    return folder / target if STEP.fullmatch(target) else None


def set_best_alias(folder: Path, step: int) -> None:
    """Let the alias `best` point to the checkpoint of `step`."""
    set_alias(folder, BEST, step)


def set_alias(folder: Path, name: str, step: int) -> None:
    """Let an alias point to the checkpoint of `step`. Readers see the old or the new one.

    A failure is logged and raises nothing: the checkpoint itself is saved.
    """
    alias, fresh = folder / name, folder / f".{name}"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder_name(step))
        fresh.replace(alias)  # a link cannot be changed in place without a moment of absence
        sync_folder(folder)
    except OSError as error:
        warn_once(f"{alias} could not be renewed: {error}")


def restore_latest_alias(folder: Path) -> None:
    """Let the alias `latest` point to the newest checkpoint, if a kill came before it did."""
    newest = list_checkpoints(folder)[-1:]
    if newest and _read_alias(folder, LATEST) != newest[0]:
        set_alias(folder, LATEST, parse_step(newest[0]))


def restore_best_alias(folder: Path, best: int, last: int) -> None:
    """Set the alias `best` as it was when step `last` was the newest and step `best` the best.

    A kill can come between a save and its alias; or the alias points to a step after `last`, from
    before the run resumed.
    """
    pointed = read_best_alias(folder)
    if (folder / folder_name(best)).is_dir():
        set_best_alias(folder, best)
    elif pointed and (parse_step(pointed) > last or not pointed.is_dir()):
        try:
            (folder / BEST).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s could not be removed: %s", folder / BEST, error)


def remove(path: Path) -> str:
    """Delete a folder after renaming it, so that its name never shows a part of it.

    Returns:
        why the folder or a part of it is still there, or an empty text if it is gone.
    """
    if why := undeletable(path):  # else it would be renamed, and then not deleted
        return why
    try:
        hidden = path.name.startswith(".")
        return delete_folder(path if hidden else path.rename(_mark(path, ".del-")))
    except OSError as error:
        return f"{path} could not be deleted: {error}"


@cache
def warn_once(text: str) -> None:
    """Log a warning, the first time that this process comes upon it."""
    log.warning("%s", text)


def clear_leftovers(folder: Path) -> list[str]:
    """Finish or undo what a killed process left half done. Only the run's owner may call this.

    Returns:
        for each folder that could not be deleted, the reason.
    """
    reasons = []
    for name in (BEST, LATEST):
        (folder / f".{name}").unlink(missing_ok=True)  # see `set_alias`
    for path in list(folder.iterdir()):
        leftover = LEFTOVER.fullmatch(path.name)
        if not leftover:
            continue
        kind, name = leftover.groups()
        # A kill came between the two renames of `publish`: the replaced checkpoint is the only one.
        if kind == "old" and not (folder / name).exists():
            path.rename(folder / name)
        elif why := remove(path):
            reasons.append(why)
    return reasons


def _mark(path: Path, mark: str) -> Path:
    return path.with_name(f"{mark}{path.name}-{secrets.token_hex(4)}")
