"""Load a recipe file and check it: all problems are reported at once, each with its place."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ..checkpoint.manifest import MANIFEST
from ..core.errors import Problem, RecipeError
from ..core.files import address_problem, require_path
from ..core.plugin_modules import import_plugins
from ..core.run_dir import RunDirectory
from ..core.text.display import format_value
from ..core.text.positions import KeyPath
from ..core.text.tree import Origin, Tree, key_paths
from ..download.hub_ids import parse_hub_id
from ..parallel.mesh import AXES, EXPERT_AXES, parse_mesh
from .checks.checks import check
from .layers import SET, apply_override, read_layers
from .messages import problems_of
from .run_length import find_integer, leave_steps_behind, shorten_warmup
from .schema import Recipe
from .structure import GivenTable, TableClass, given_tables, slot


@dataclass(frozen=True)
class Loaded:
    """A checked recipe and where its values came from."""

    recipe: Recipe
    tree: Tree
    """what was written, merged"""
    path: Path
    warnings: Sequence[str] = ()
    """changes that `--set` made to other keys than its own"""


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), world: int | None = None
) -> Loaded:
    """Read, merge and check a recipe.

    Args:
        path: the TOML file.
        overrides: `key=value` of each `--set`, the last wins.
        world: number of ranks, where it is known.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    require_path(path)
    path = Path(path)
    return load_tree(read_layers(path), path, overrides, world)


def load_overrides(overrides: Sequence[str]) -> Loaded:
    """Check a recipe that is nothing but `key=value` over the defaults.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    return load_tree(Tree(origins={(): Origin(SET)}), Path(SET), overrides, None)


def load_tree(
    tree: Tree,
    path: Path,
    overrides: Sequence[str],
    world: int | None,
    *,
    trusted: Collection[str] | None = None,
) -> Loaded:
    """Check a recipe that was read.

    Args:
        tree: the values and where they were written.
        path: the file, or the folder, that was read.
        overrides: `key=value` of each `--set`, the last wins.
        world: number of ranks, where it is known.
        trusted: the only modules of `[plugins]` that are imported, beside those given by `--set`;
            None: all.

    Raises:
        RecipeError: everything that is wrong with it, or modules that are not trusted.
    """
    problems: list[Problem] = []
    written_steps = find_integer(tree, "run", "steps")
    for override in overrides:
        try:
            apply_override(tree, override)
        except RecipeError as error:
            problems += error.problems
    # Before anything looks up a component: plugins register the names that recipes use.
    if trusted is not None:
        _require_trusted(tree, trusted)
    problems += _import_plugins(tree, is_users=trusted is None)
    _name_run(tree, path)
    leave_behind(tree)
    _share_plugin_tables(tree)
    warnings = shorten_warmup(tree, written_steps)
    problems += _spread_mesh(tree)
    # Last: the tables that the steps above have copied hold paths too.
    _resolve_paths(tree)
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        raise RecipeError(problems + problems_of(error, tree)) from None
    problems += [tree.problem(key, message, hint) for key, message, hint in check(recipe, world)]
    if problems:
        raise RecipeError(problems)
    return Loaded(recipe, tree, path, warnings)


def _named_modules(tree: Tree) -> dict[str, KeyPath]:
    """Return the modules of `[plugins]`, and where each is written."""
    plugins = tree.values.get("plugins")
    modules = plugins.get("modules") if isinstance(plugins, dict) else None
    named = enumerate(modules) if isinstance(modules, list) else ()
    return {
        module: ("plugins", "modules", index) for index, module in named if isinstance(module, str)
    }


def _require_trusted(tree: Tree, trusted: Collection[str]) -> None:
    """Refuse modules that a run's own recipe names and the user does not.

    Raises:
        RecipeError: the modules, and the words that name them.
    """
    unknown = {
        module: path
        for module, path in _named_modules(tree).items()
        if module not in trusted and tree.origin(path).file != SET
    }
    words = " ".join(f"--plugin {shlex.quote(module)}" for module in unknown)
    problems = [
        tree.problem(
            path,
            f"the run would import {format_value(module)}, which is code",
            f"if you trust this folder, add {words}",
        )
        for module, path in unknown.items()
    ]
    if problems:
        raise RecipeError(problems)


def _import_plugins(tree: Tree, *, is_users: bool) -> list[Problem]:
    """Import the modules of `[plugins]`.

    Args:
        tree: the recipe.
        is_users: whether the user named its file, so that modules beside it are the user's too.
    """
    named = _named_modules(tree)
    folders = {
        module: _search_folder(tree.origin(path), is_users) for module, path in named.items()
    }
    return [tree.problem(named[module], message) for module, message in import_plugins(folders)]


def _search_folder(origin: Origin, is_users: bool) -> Path | None:
    """Return the folder in which a plugin may lie; None: Python's search path alone."""
    folder = origin.folder.absolute()
    if origin.file == SET:
        return folder
    # What lies in the folder of a run or a checkpoint may be another's.
    run = RunDirectory(folder)
    is_run = run.checkpoints.exists() or run.metrics.exists() or (folder / MANIFEST).exists()
    return folder if is_users and not is_run else None


def _name_run(tree: Tree, path: Path) -> None:
    run = tree.values.setdefault("run", {})
    if isinstance(run, dict) and run.get("name", "") == "":
        name = re.sub(r"[^\w.-]+", "-", path.stem).strip(".-") or "run"
        tree.replace(("run", "name"), name, {("run", "name"): Origin("the file's name")})


def leave_behind(tree: Tree) -> None:
    """Drop the keys of a component from a lower layer that the one named above it does not have.

    TOML has no way to take a key back, so `name = "sgd"` over a base with AdamW's betas would never
    validate. Only keys that another component of the kind knows are dropped: typos stay.
    """
    # Lists, because the loops remove what they would iterate over.
    for table in list(given_tables(tree.values)):
        if table.registry is None or "name" not in table.values:
            continue
        layer = tree.origin((*table.path, "name")).layer
        for key in list(table.values):
            is_older = tree.origin((*table.path, key)).layer < layer
            if is_older and key not in table.config.model_fields and table.registry.owners(key):
                tree.remove((*table.path, key))
    leave_steps_behind(tree)


def _share_plugin_tables(tree: Tree) -> None:
    """Fill the fields of components whose type is a plugin's table from `[plugins.NAME]`."""
    given: dict[TableClass | None, GivenTable] = {
        table.config: table for table in given_tables(tree.values) if _is_plugin_table(table)
    }
    for table in list(given_tables(tree.values)):
        for key, field in table.config.model_fields.items():
            source = given.get(slot(field).table) if table.registry else None
            if source and key not in table.values:
                here = (*table.path, key)
                origins = {
                    (*here, *path[len(source.path) :]): tree.origin(path)
                    for path in key_paths(source.values, source.path)
                }
                # A copy: later steps change tables in place.
                tree.replace(here, deepcopy(source.values), origins)


def _is_plugin_table(table: GivenTable) -> bool:
    """Return whether a table is a valid one of `[plugins]`; faults are reported there alone."""
    if table.path[:1] != ("plugins",) or len(table.path) != 2:
        return False
    try:
        table.config.model_validate(table.values)
    except ValidationError:
        return False
    return True


def _spread_mesh(tree: Tree) -> list[Problem]:
    """Put the degrees of `parallel.mesh` into keys of their own.

    They replace those of lower layers, and those of higher layers replace them.
    """
    path = ("parallel", "mesh")
    table = tree.values.get("parallel")
    text = table.get("mesh") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(text, str) or not text:
        return []
    origin = tree.origin(path)
    degrees, faults = parse_mesh(text)
    problems = [tree.problem(path, *fault) for fault in faults]
    for axis in [axis for axis in (*AXES, *EXPERT_AXES) if axis in table]:
        layer = tree.origin(("parallel", axis)).layer
        if layer == origin.layer:
            message = f"parallel.{axis} is given beside it"
            problems.append(tree.problem(path, message, f"keep one, or write {axis} in the text"))
        elif layer > origin.layer:
            del degrees[axis]
    tree.remove(path)
    for axis, degree in degrees.items():
        if not problems:
            tree.replace(("parallel", axis), degree, {("parallel", axis): origin})
    return problems


def _resolve_paths(tree: Tree) -> None:
    """Make the paths that are read absolute: they start where their writer stands."""
    for table in list(given_tables(tree.values)):
        for key, field in table.config.model_fields.items():
            value = table.values.get(key)
            if not (slot(field).is_path and isinstance(value, str) and value):
                continue
            folder = tree.origin((*table.path, key)).folder
            if slot(field).or_hub_id and parse_hub_id(value, folder):
                continue
            if not address_problem(value):  # the key's own validator refuses one
                table.values[key] = os.path.abspath(folder / os.path.expanduser(value))
