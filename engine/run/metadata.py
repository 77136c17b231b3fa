"""What an attempt at a run was made of: code, recipe, versions, command and host.

Each attempt leaves a folder `metadata/0001/` in the run directory. What can be secret is left out.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from ... import __version__
from ..checkpoint.manifest import SaveInfo
from ..core.errors import TrainerError
from ..core.files import atomic_write
from ..core.run_dir import RunDirectory
from ..core.text.display import redact, redact_text, remove_secret
from ..core.unfinished import Unfinished, clear_unfinished
from ..recipe.schema import Recipe
from ..recipe.write import changed_values, format_toml, to_toml

log = logging.getLogger(__name__)
FOLDER = "metadata"
GIT_SECONDS = 20.0
MAX_DIFF = 2**24
"""characters of a diff that are kept; the hash is of all"""
PACKAGES = ("triton", "numpy", "pydantic", "safetensors", "torchdata", "tokenizers", "datasets")
PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Checkout:
    """A git checkout that a run's code comes from.

    Attributes:
        holds: "package" or "working directory".
        folder: the root of the checkout.
        commit: the commit that is checked out.
        diff: what differs from the commit in files that git knows; empty: nothing.
    """

    holds: str
    folder: str
    commit: str
    diff: str

    @property
    def name(self) -> str:
        """The commit's first digits, and a hash of the changes if there are any."""
        changes = xxhash.xxh3_64_hexdigest(self.diff.encode())[:8]
        return self.commit[:12] + (f"+{changes}" if self.diff else "")


def find_checkouts() -> list[Checkout]:
    """Return the checkouts that hold this package and the working directory, those that are one."""
    found = []
    # A package that was installed into an environment inside a checkout is not of that checkout.
    if _git(PACKAGE, "ls-files", "--error-unmatch", "__init__.py"):
        found.append(_read_checkout("package", PACKAGE))
    found.append(_read_checkout("working directory", Path.cwd()))
    known: dict[str, Checkout] = {}
    for each in found:
        if each is not None:
            known.setdefault(each.folder, each)
    return list(known.values())


def _read_checkout(holds: str, folder: Path) -> Checkout | None:
    words = _git(folder, "rev-parse", "--show-toplevel", "HEAD").splitlines()
    if len(words) != 2:
        return None
    # Programs that the checkout's own settings name for a diff are not run.
    diff = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--full-index")
    top, commit = words
    return Checkout(holds, top, commit, diff)


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; empty where it fails or is not installed."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, env=environment, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def name_run(checkouts: Sequence[Checkout], recipe_hash: str) -> str:
    """Return the id of a run: its code, or the version of an installed package, and its recipe."""
    names = [each.name for each in checkouts]
    if not any(each.holds == "package" for each in checkouts):
        names.insert(0, __version__)
    return "-".join([*names, recipe_hash[:12]])


def write_recipe(
    run: RunDirectory,
    recipe: Recipe,
    info: SaveInfo,
    checkouts: Sequence[Checkout],
    device: str,
) -> None:
    """Write recipe.toml, and the record of an attempt.

    A record appears complete or not at all; a run continues without one.

    Args:
        run: the run directory.
        recipe: the recipe of the attempt.
        info: what each checkpoint says of the attempt.
        checkouts: where the code comes from.
        device: what the attempt computes on.
    """
    atomic_write(run.recipe, to_toml(recipe))
    folder = run.path / FOLDER
    try:
        taken = [int(each.name) for each in folder.glob("[0-9]*") if each.name.isdecimal()]
        last = max(taken, default=0)
        # The last attempt may have been killed after its record had got its name.
        for why in clear_unfinished(folder, [f"{last:04d}"]):
            log.warning("%s", why)
        unfinished = Unfinished(folder / f"{last + 1:04d}")
    except (OSError, TrainerError) as error:
        log.warning("no record in %s: %s", folder, error)
        return
    try:
        unfinished.path.mkdir()
        for name, text in _files(recipe, info, checkouts, device).items():
            with (unfinished.path / name).open("w", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        unfinished.publish()
    except (OSError, TrainerError) as error:
        unfinished.discard()
        log.warning("no record in %s: %s", folder, error)


def _files(
    recipe: Recipe, info: SaveInfo, checkouts: Sequence[Checkout], device: str
) -> dict[str, str]:
    """Return the texts of a record by file name, without secrets."""
    record = {
        "run_id": info.run_id,
        "attempt": info.attempt,
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [redact_text(remove_secret(word)) for word in sys.argv],
        "working_directory": os.getcwd(),
        "host": _describe_host(info, device),
        "versions": {**info.versions, **_versions()},
        "code": [
            {"holds": each.holds, "folder": each.folder, "commit": each.commit, "id": each.name}
            for each in checkouts
        ],
    }
    files = {
        "run.json": json.dumps(redact(record), indent=1) + "\n",
        "recipe.toml": to_toml(recipe),
        "changed.toml": format_toml(redact(changed_values(recipe))),
    }
    for each in checkouts:
        if each.diff:
            name = f"{each.holds.replace(' ', '-')}.diff"
            files[name] = redact_text(each.diff[:MAX_DIFF])
    return files


def _describe_host(info: SaveInfo, device: str) -> dict[str, Any]:
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "device": device,
        "ranks": info.world,
    }


def _versions() -> dict[str, str]:
    found = {"cuda": torch.version.cuda or ""}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
