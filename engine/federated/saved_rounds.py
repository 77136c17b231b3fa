"""The rounds of a federation on the disk. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.find import candidates
from ..checkpoint.manifest import Manifest, read_manifest, verify
from ..core.errors import CheckpointError, RecipeError


@dataclass(frozen=True)
class SavedRound:
    """A checkpoint of a federation.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        problems: what is wrong with the names and sizes of its files; empty: it is complete.
    """

    path: Path
    manifest: Manifest
    problems: list[str]

    @property
    def number(self) -> int:
        """The number of finished rounds."""
        number: int = self.manifest.extra["federation"]["round"]
        return number

    @property
    def clients(self) -> list[dict[str, Any]]:
        """The numbers that it keeps of each client."""
        clients: list[dict[str, Any]] = self.manifest.extra["federation"]["clients"]
        return clients


def list_rounds(path: Path) -> list[SavedRound]:
    """Return the rounds at a path, oldest first; checkpoints without a manifest are left out.

    Args:
        path: a run directory, a checkpoints folder, or one checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    rounds = []
    for folder in candidates(path)[::-1]:
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue
        federation = manifest.extra.get("federation")
        if isinstance(federation, dict) and {"round", "clients"} <= federation.keys():
            rounds.append(SavedRound(folder, manifest, verify(folder, hashes=False)))
    if not rounds:
        raise CheckpointError(f"no round of a federation in {path}")
    return rounds


def find_round(path: Path, number: int) -> SavedRound:
    """Return a round at a path.

    Args:
        path: see `list_rounds`.
        number: number of the round; a negative one counts from the end, so that -1 is the newest.

    Raises:
        CheckpointError: there is none.
        RecipeError: the round is not there.
    """
    rounds = list_rounds(path)
    if number < 0:
        found = rounds[number:][:1] if -number <= len(rounds) else []
    else:
        found = [each for each in rounds if each.number == number]
    if not found:
        known = ", ".join(str(each.number) for each in rounds)
        raise RecipeError(f"--round {number}: no such round in {path}", f"there are {known}")
    return found[0]
