"""Finds the newest checkpoint that is intact. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CheckpointError, ExitCode
from ..core.files import require_path
from ..core.text.display import list_problems
from .manifest import MANIFEST, Manifest, check_hashes, check_listing, read_manifest, verify
from .ranks import Ranks
from .retention import STEP, list_checkpoints, parse_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class IntactCheckpoint:
    """A checkpoint whose every byte was compared.

    Attributes:
        skipped: for each newer checkpoint that is damaged, its name and what is wrong.
    """

    path: Path
    manifest: Manifest
    skipped: list[str]


def find_checkpoint(path: Path, group: ProcessGroup | None = None) -> IntactCheckpoint:
    """Return the newest intact checkpoint at a path; see `candidates` and `Ranks`.

    Raises:
        CheckpointError: there is none, or none is intact.
    """
    found = newest_intact(path, Ranks(group))
    if found is None:
        raise CheckpointError(f"no checkpoint in {path}")
    return found


def candidates(path: Path) -> list[Path]:
    """Return the checkpoints at a path, newest first.

    Args:
        path: a run directory, a checkpoints folder, or one checkpoint, also by the alias `best`.

    Raises:
        RecipeError: it is an address such as `s3://bucket/run`.
    """
    require_path(path)
    if is_checkpoint(path):
        return [path.resolve() if path.is_symlink() else path]
    return list_checkpoints(checkpoints_folder(path))[::-1]


def code_before_training(run: Path, resume: str) -> ExitCode:
    """Return the exit code of a run that a signal stops before its first step is done.

    Nothing is lost if a complete checkpoint exists, because the same command resumes from it.

    Args:
        run: the run directory.
        resume: the key `run.resume`.
    """
    try:
        found = candidates(run if resume == "auto" else Path(resume))
        stands = resume != "never" and any(not verify(each, hashes=False) for each in found)
    except OSError:
        stands = False
    return ExitCode.STOPPED_AND_SAVED if stands else ExitCode.INTERRUPTED


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is one checkpoint, intact or not."""
    return bool(STEP.fullmatch(path.name)) or os.path.exists(path / MANIFEST)


def checkpoints_folder(path: Path) -> Path:
    """Return the folder with the checkpoints of a run directory, or the path itself."""
    inner = path / "checkpoints"
    return inner if os.path.isdir(inner) else path


def newest_intact(
    path: Path,
    ranks: Ranks,
    before: int | None = None,
    is_wanted: Callable[[Manifest], bool] | None = None,
) -> IntactCheckpoint | None:
    """Return the newest checkpoint whose every byte is as it was saved; None: there is none.

    The ranks divide the hashing between them and agree.

    Args:
        path: see `candidates`.
        ranks: all ranks that will load the checkpoint.
        before: only checkpoints of earlier steps than this are considered; None: all.
        is_wanted: only checkpoints with such a manifest are considered; None: all.

    Raises:
        CheckpointError: there are checkpoints, and none is intact.
    """
    skipped: list[str] = []
    for candidate in ranks.reduce(lambda: None, lambda _: _list_wanted(path, is_wanted)):
        if before is not None and parse_step(candidate) >= before:
            continue
        manifest, problems = _check(candidate, ranks)
        if manifest is not None and not problems:
            return IntactCheckpoint(candidate, manifest, skipped)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped.append(f"{candidate.name}: {problems[0]}{more}")
    if skipped:
        raise CheckpointError(
            list_problems(f"no checkpoint in {path} is intact:", skipped),
            "restore one of them from a copy, or start again with another run.name",
        )
    return None


def _list_wanted(path: Path, is_wanted: Callable[[Manifest], bool] | None) -> list[Path]:
    """Return the candidates, or those whose manifest can be read and is wanted."""
    found = []
    for candidate in candidates(path):
        with suppress(CheckpointError):
            if is_wanted is None or is_wanted(read_manifest(candidate)):
                found.append(candidate)
    return found


def _check(path: Path, ranks: Ranks) -> tuple[Manifest | None, list[str]]:
    manifest: Manifest | None = None

    def check_share() -> list[str]:
        nonlocal manifest
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            return [error.message]
        problems = check_listing(path, manifest) if ranks.rank == 0 else []
        # Each rank hashes its share, so that a large checkpoint is read once and not by every rank.
        share = sorted(manifest.files)[ranks.rank :: ranks.size]
        return problems or check_hashes(path, {name: manifest.files[name] for name in share})

    problems = ranks.reduce(check_share, lambda parts: [text for part in parts for text in part])
    return manifest, list(dict.fromkeys(problems))
