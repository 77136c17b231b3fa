"""The recipe in a run's folder or in a checkpoint, with which that run resumes. Torch-free.

Such a folder may come from somebody else: nothing in it is imported, and no code is read from where
it says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.find import is_checkpoint
from ..checkpoint.manifest import MANIFEST, read_manifest
from ..core.errors import RecipeError
from ..core.files import require_path
from ..core.plugin_modules import require_plugins
from ..core.run_dir import RunDirectory
from ..core.text.positions import KeyPath
from ..core.text.tree import Origin, Tree, leaves
from .layers import read_layers
from .load import Loaded, load_recipe, load_tree
from .read import unusable_values

CODE_PLACES: set[KeyPath] = {("compile", "cache_dir"), ("evaluate", "harness", "include_path")}
"""keys that say where code lies"""


def load_recipe_or_run(
    path: Path, overrides: Sequence[str], world: int | None, plugins: Sequence[str]
) -> Loaded:
    """Load a recipe, or the recipe of a run that is to be resumed.

    Args:
        path: a TOML file; or a run directory, which resumes from its newest checkpoint, or a
            checkpoint, which resumes from itself.
        overrides: `key=value` of each `--set`, the last wins.
        world: number of ranks, where it is known.
        plugins: modules that the user names. Those that a run's own recipe names are imported only
            if they are among them.

    Raises:
        RecipeError: everything that is wrong with the recipe, or modules that the user must name.
        CheckpointError: the checkpoint's manifest cannot be read.
    """
    require_path(path)
    require_plugins(plugins)
    if not path.is_dir():
        return load_recipe(path, overrides, world)
    tree = _read_checkpoint(path) if is_checkpoint(path) else _read_run(path)
    # What torch.compile keeps is code, and tasks may name some: the user alone says where they lie.
    for key in {path for path, _ in leaves(tree.values)} & CODE_PLACES:
        tree.remove(key)
    return load_tree(tree, path, overrides, world, trusted=plugins)


def _read_run(path: Path) -> Tree:
    """Return the recipe of a run directory, which resumes where it lies now."""
    file = RunDirectory(path).recipe
    if not file.is_file():
        raise RecipeError(
            f"{path} is no run directory: it has no {file.name}",
            "give a recipe's file, a run directory or a checkpoint",
        )
    tree = read_layers(file)
    _set_run(tree, path, "auto")
    return tree


def _read_checkpoint(path: Path) -> Tree:
    """Return the recipe of a checkpoint; in a run directory, that run resumes from it."""
    path = path.resolve() if path.is_symlink() else path
    values = _without_none(read_manifest(path).recipe)
    tree = Tree(values, {(): Origin(str(path / MANIFEST), layer=1)}, 1)
    problems = [tree.problem(key, message) for key, message in unusable_values(values)]
    if problems:
        raise RecipeError(problems)
    run = Path(os.path.abspath(path)).parent.parent
    in_run = path.parent.name == "checkpoints" and RunDirectory(run).recipe.is_file()
    _set_run(tree, run if in_run else None, str(path))
    return tree


def _without_none(value: Any) -> Any:
    """Return plain data without keys that have no value, as TOML writes it."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _set_run(tree: Tree, folder: Path | None, resume: str) -> None:
    """Let a recipe's run be the one in a folder, and say from what it resumes.

    Args:
        tree: the recipe.
        folder: the run directory; None leaves the one that the recipe names.
        resume: the value of `run.resume`.
    """
    run = tree.values.setdefault("run", {})
    if not isinstance(run, dict):
        return  # validation reports it
    parts = [str(run.get(key) or "") for key in ("experiment", "lineage", "name")]
    given = {"resume": resume}
    if folder is not None and not _is_same(Path(str(run.get("dir", "runs")), *parts), folder):
        # The folder was moved, or is named from another working directory.
        below = Path(*parts)
        place = Path(os.path.abspath(folder))
        if place.parts[-len(below.parts) :] == below.parts:
            given |= {"dir": str(Path(*place.parts[: -len(below.parts)]))}
        else:
            given |= {"dir": str(place.parent), "experiment": "", "lineage": ""}
            given |= {"name": place.name}
    for key, value in given.items():
        path: KeyPath = ("run", key)
        tree.replace(path, value, {path: Origin("the run's folder", layer=tree.num_layers)})


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
