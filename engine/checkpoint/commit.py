"""One save: from an empty temporary folder to a published checkpoint, or an explained failure."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import faults
from ..core.errors import CheckpointError, LostContact, TrainerError
from ..core.files import sync_folder
from . import retention
from .manifest import FileEntry, Manifest, SaveInfo, check_listing, write_manifest

if TYPE_CHECKING:
    import torch

    from .ranks import Ranks
    from .writer import Writer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: Path) -> int:
    """Return what may still be written to a folder's file system."""
    return shutil.disk_usage(folder).free


@contextmanager
def explain_write_errors(folder: Path, needed: int) -> Iterator[None]:
    """Check that there is space for `needed` bytes, and explain what fails in the block.

    Raises:
        CheckpointError: the disk is full, the folder is gone, or writing is refused.
    """
    try:
        # Checked first, so that a full disk is not found after minutes of writing.
        if needed > free_bytes(folder):
            raise OSError(errno.ENOSPC, "not enough space")
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise _explain_write_error(error, folder, needed) from error


def _explain_write_error(error: Exception, folder: Path, needed: int) -> CheckpointError:
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


@dataclass
class Staging:
    """How far a save in the background is with its copy of the state.

    Attributes:
        after: event that the GPU passes when the state may be read; None without a GPU.
        copied: event that the GPU passes when the copies are made; None until they are started.
        done: set when the copies are made or started, or the save failed.
    """

    after: torch.cuda.Event | None = None
    copied: torch.cuda.Event | None = None
    done: threading.Event = field(default_factory=threading.Event)


def commit(
    state: Mapping[str, torch.Tensor],
    info: SaveInfo,
    *,
    folder: Path,
    aliases: Collection[str],
    prune: Callable[[], None],
    ranks: Ranks,
    writer: Writer,
    staging: Staging | None,
) -> None:
    """Save a state; all ranks together. On failure nothing is published, and all ranks know.

    `aliases` are names of `retention` that point to the checkpoint once it is published; then rank
    0 calls `prune`.

    Raises:
        CheckpointError: why this rank or another could not do its part.
        LostContact: a rank was lost.
    """
    # Always a fresh folder: after a kill while one is overwritten, old and new files can look like
    # one checkpoint.
    temporary = folder / ranks.reduce(lambda: None, lambda _: _make_temporary(folder, info.step))
    try:
        writer.plan(state)
        # `reduce` waits for every rank's part, so rank 0 publishes only what all have synced.
        ranks.reduce(
            lambda: _write_part(temporary, info.step, ranks.rank, writer, staging),
            lambda parts: _publish(temporary, info, parts, writer, aliases, prune),
        )
    except (CheckpointError, LostContact):
        if ranks.rank == 0:  # one rank alone: the others would delete files under its hands
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_temporary(folder: Path, step: int) -> str:
    name = retention.make_temporary_name(step)
    try:
        (folder / name).mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot make a folder in {folder}: {error.strerror}") from error
    return name


def _write_part(
    temporary: Path, step: int, rank: int, writer: Writer, staging: Staging | None
) -> dict[str, FileEntry]:
    """Write and sync what this rank holds; with `staging`, from a copy in memory."""
    faults.point("checkpoint.before_copy", rank, step)
    if staging is not None:
        staging.copied = writer.copy(staging.after)
        staging.done.set()  # the optimizer may change the state from here on
        if staging.copied is not None:
            staging.copied.synchronize()
    with explain_write_errors(temporary, writer.planned_bytes):
        faults.point("checkpoint.before_write", rank, step)
        part = writer.write(temporary)
        faults.point("checkpoint.after_write", rank, step)
    return part


def _publish(
    temporary: Path,
    info: SaveInfo,
    parts: list[dict[str, FileEntry]],
    writer: Writer,
    aliases: Collection[str],
    prune: Callable[[], None],
) -> None:
    """Complete the folder, give it its final name, and prune older checkpoints; on rank 0."""
    files = {name: entry for entries in parts for name, entry in entries.items()}
    with explain_write_errors(temporary, 0):
        files |= writer.finish(temporary)
        manifest = Manifest(
            **vars(info),
            tensors=writer.tensors(),
            files=files,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        faults.point("checkpoint.before_manifest", 0, info.step)
        write_manifest(temporary, manifest)  # last: a folder without it is no checkpoint
        faults.point("checkpoint.after_manifest", 0, info.step)
        sync_folder(temporary)
        problems = check_listing(temporary, manifest)
        if problems:  # the ranks do not see the same folder
            raise CheckpointError(
                f"{temporary}: {problems[0]}",
                "run.dir must be on a file system that all ranks share",
            )
        faults.point("checkpoint.before_rename", 0, info.step)
        retention.publish(temporary, info.step)
        faults.point("checkpoint.after_rename", 0, info.step)
    if retention.LATEST in aliases:
        retention.set_alias(temporary.parent, retention.LATEST, info.step)
        faults.point("checkpoint.after_latest", 0, info.step)
    if retention.BEST in aliases:
        retention.set_best_alias(temporary.parent, info.step)
        faults.point("checkpoint.after_best", 0, info.step)
    # Only now, after the new checkpoint is durable: until then the old ones are all there is.
    prune()
