"""Validates, edits, branches and prunes the rounds of a run.

A round is never changed in place: the edited one takes its name by a rename, and the original stays
beside it as `backup-step-XXXXXXXX-...`, which no run resumes from.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.chunks import INDEX
from ..checkpoint.find import checkpoints_folder
from ..checkpoint.manifest import (
    MANIFEST,
    Manifest,
    file_entry,
    verify,
    write_manifest,
)
from ..checkpoint.retention import make_temporary_name, publish, remove, restore_latest_alias
from ..core.errors import RecipeError, nearest
from ..core.files import atomic_write, open_regular
from ..core.run_dir import RunDirectory, read_recipe
from ..core.unfinished import Unfinished
from ..recipe.write import format_toml
from .saved_rounds import SavedRound, list_rounds

RESET = ("error", "weight", "late")
"""sections of a client that start again with its optimizer states; buffers stay"""


def find_problems(saved: SavedRound) -> list[str]:
    """Return what is wrong with a round: damaged files, and state that does not fit together."""
    problems = verify(saved.path)
    manifest, table = saved.manifest, saved.manifest.recipe.get("federation") or {}
    names = [str(client.get("name")) for client in saved.clients]
    if len(set(names)) < len(names):
        problems.append("two clients have the same name")
    expected = len(table.get("client") or []) or table.get("clients")
    if expected is not None and expected != len(names):
        problems.append(f"the recipe has {expected} clients, the round {len(names)}")
    steps = table.get("local_steps")
    if steps and manifest.step != saved.number * steps:
        problems.append(f"round {saved.number} of {steps} steps each ends at step {manifest.step}")
    for client in saved.clients:
        if client["last_round"] > saved.number:
            problems.append(f"client {client['name']} trained in round {client['last_round']}")
    weights = {
        name.removeprefix("model."): entry["shape"]
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    }
    for name, entry in manifest.tensors.items():
        section, _, weight = name.partition(".")
        is_own = section.startswith("server_") or section.endswith(RESET)
        if is_own and weights.get(weight) != entry["shape"]:
            problems.append(
                f"{name} has the shape {entry['shape']}, its weight {weights.get(weight)}"
            )
    return problems


def edit_round(
    run: Path, saved: SavedRound, number: int | None = None, clients: Collection[str] = ()
) -> tuple[Path, Path]:
    """Change the number of a round, or let clients start again with empty states.

    Rounds after the new number are renamed to `abandoned-...`: the run resumes from this one.

    Args:
        run: the run directory, which nothing else may use.
        saved: the round.
        number: its new number, at least 1; None: it stays.
        clients: names of the clients that start again.

    Returns:
        the edited round, and the backup.

    Raises:
        RecipeError: there is no such client.
        RunInUse: the run is running.
    """
    known = [str(client["name"]) for client in saved.clients]
    for name in clients:
        if name not in known:
            hint = nearest(name, known) or f"known: {', '.join(known)}"
            raise RecipeError(f"--reset-client {name}: no such client", hint)
    number = saved.number if number is None else number
    step = saved.manifest.step // max(saved.number, 1) * number
    manifest = _change(saved.manifest, number, step, {known.index(name) for name in clients})
    folder = saved.path.parent
    with _hold(run):
        backup = folder / f"backup-{saved.path.name}-{secrets.token_hex(4)}"
        temporary = folder / make_temporary_name(step)
        _link(saved.path, backup)
        _link(saved.path, temporary, leave_out=(MANIFEST, INDEX))
        # The data files stay as they are: what no index names is not read.
        with open_regular(saved.path / INDEX) as file:
            index = json.load(file)
        index["chunks"] = {name: index["chunks"][name] for name in manifest.tensors}
        atomic_write(temporary / INDEX, json.dumps(index))
        files = {**manifest.files, INDEX: file_entry(temporary / INDEX)}
        write_manifest(temporary, replace(manifest, files=files))
        if step != saved.manifest.step:
            remove(saved.path)
        edited = publish(temporary, step)
        restore_latest_alias(folder)
        return edited, backup


def _change(manifest: Manifest, number: int, step: int, reset: Collection[int]) -> Manifest:
    """Return the manifest of an edited round."""
    extra = dict(manifest.extra)
    federation = dict(extra["federation"])
    federation["round"] = number
    federation["clients"] = [
        {
            **client,
            "last_round": 0 if index in reset else min(client["last_round"], number),
            "late_weight": 0.0 if index in reset else client.get("late_weight", 0.0),
            "optimizer_numbers": {} if index in reset else client["optimizer_numbers"],
        }
        for index, client in enumerate(federation["clients"])
    ]
    prefixes = tuple(f"client{index}_" for index in reset)
    tensors = {
        name: entry
        for name, entry in manifest.tensors.items()
        if not (prefixes and name.startswith(prefixes)) or "_buffer." in name
    }
    extra["federation"] = federation
    return replace(manifest, step=step, extra=extra, tensors=tensors)


def branch_round(run: Path, saved: SavedRound, target: Path) -> None:
    """Start a run directory that resumes from a round of another run.

    Args:
        run: the run directory of the round.
        saved: the round.
        target: the run directory to make, which must not exist.

    Raises:
        RecipeError: the target exists.
    """
    recipe: dict[str, Any] = read_recipe(run) or dict(saved.manifest.recipe)
    path = Path(os.path.abspath(target))
    own = {**recipe.get("run", {}), "name": path.name, "dir": str(path.parent)}
    for key in ("experiment", "lineage", "resume"):
        own.pop(key, None)
    unfinished = Unfinished(target)
    try:
        folder = unfinished.path / "checkpoints" / saved.path.name
        folder.parent.mkdir(parents=True)
        shutil.copytree(saved.path, folder)
        atomic_write(unfinished.path / "recipe.toml", format_toml(_plain({**recipe, "run": own})))
        unfinished.publish()
    except BaseException:
        unfinished.discard()
        raise


def prune_rounds(path: Path, keep: int) -> list[Path]:
    """Delete all rounds but the newest intact ones, and damaged ones.

    Args:
        path: a run directory or a checkpoints folder.
        keep: how many intact rounds stay, at least 1; if none is intact, nothing is deleted.

    Returns:
        what was deleted.

    Raises:
        RunInUse: the run is running.
    """
    with _hold(checkpoints_folder(path).parent):
        rounds = list_rounds(path)
        # By content: a round whose bytes have changed does not count as one that is left.
        intact = [each for each in rounds if not verify(each.path)]
        stay = {each.path for each in intact[-keep:]}
        if not stay:
            return []
        gone = [each.path for each in rounds if each.path not in stay]
        removed = [each for each in gone if not remove(each)]
        restore_latest_alias(rounds[0].path.parent)  # the newest round may have been damaged
        return removed


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without null, which TOML lacks."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _link(source: Path, target: Path, leave_out: Collection[str] = ()) -> None:
    """Copy a folder without its bytes where the file system can."""
    target.mkdir()
    for file in source.rglob("*"):
        place = target / file.relative_to(source)
        if file.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif file.name not in leave_out:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except OSError:
                shutil.copyfile(file, place)


@contextmanager
def _hold(run: Path) -> Iterator[None]:
    """Keep a run from starting in its directory meanwhile."""
    if not (run / ".lock").exists():  # checkpoints without their run
        yield
        return
    directory = RunDirectory(run)
    directory.lock()
    try:
        yield
    finally:
        directory.unlock()
