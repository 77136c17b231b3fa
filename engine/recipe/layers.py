"""The layers of a recipe: the file, what it extends, and each `--set key=value`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli

from ..core.errors import Problem, RecipeError
from ..core.files import address_problem
from ..core.text.display import format_key, format_value, make_printable, shorten
from ..core.text.positions import MAX_DEPTH, KeyPath
from ..core.text.tree import Origin, Tree, key_paths
from .read import TomlFile, read_toml, unusable_values
from .structure import default_tables

MAX_EXTENDS = 16
MAX_FILES = 64


def read_layers(path: Path) -> Tree:
    """Return the file merged over what it extends.

    Raises:
        RecipeError: what is wrong in any of the files, all at once.
    """
    reader = _Reader()
    reader.visit(path, [], None)
    if reader.problems:
        raise RecipeError(reader.problems)
    return reader.tree


class _Reader:
    """Reads files depth first, so that a recipe is merged after the recipes that it extends."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.problems: list[Problem] = []
        self.num_files = 0

    def visit(self, path: Path, chain: list[Path], entry: Problem | None) -> None:
        """Merge the file at `path`.

        Args:
            path: the file.
            chain: the files that led here, links resolved.
            entry: the place of the `extends` entry that names it, none for the recipe itself.
        """
        self.num_files += 1
        # Links resolved: a circle may lead through another name of the same file.
        real = Path(os.path.realpath(path))
        try:
            if entry:
                self._refuse_endless(real, chain, entry)
            file = read_toml(path)
        except RecipeError as error:
            self.problems += [_blame(problem, entry) for problem in error.problems]
            return
        for extended, place in self._extended(file):
            self.visit(file.folder / extended, [*chain, real], place)
        # After the files that it extends were merged: a recipe wins over them.
        file.tree.pop("extends", None)
        self.tree.num_layers += 1
        origin = Origin(file.name, 1, 1, self.tree.num_layers, Path(os.path.abspath(file.folder)))
        origins = {
            key: replace(origin, line=line, column=column)
            for key, (line, column) in file.positions.items()
        }
        self.tree.origins[()] = origin
        self.tree.merge(file.tree, origins)

    def _refuse_endless(self, real: Path, chain: list[Path], entry: Problem) -> None:
        message = ""
        if real in chain:
            names = [make_printable(each.name) for each in [*chain[chain.index(real) :], real]]
            message = f"extends in a circle: {' -> '.join(names)}"
        elif len(chain) > MAX_EXTENDS:
            message = f"extends deeper than {MAX_EXTENDS} files"
        # The depth does not limit the number: files that extend two each double it at each level.
        elif self.num_files > MAX_FILES:
            message = f"extends more than {MAX_FILES} files in all"
        if message:
            raise RecipeError([replace(entry, message=message)])

    def _extended(self, file: TomlFile) -> Iterator[tuple[str, Problem]]:
        """Yield the entries of `extends` with their places; report the unusable ones."""
        entries = file.tree.get("extends", [])
        keyed: list[tuple[KeyPath, object]] = [(("extends",), entries)]
        if isinstance(entries, list):
            keyed = [(("extends", index), entry) for index, entry in enumerate(entries)]
        for key, entry in keyed:
            place = Problem("", format_key(key), file.name, *file.positions[key])
            if isinstance(entry, str) and (problem := address_problem(entry)):
                self.problems.append(replace(place, message=make_printable(problem)))
            elif isinstance(entry, str) and entry.endswith(".toml"):
                yield entry, place
            else:
                message = f"expected the path of a .toml file, got {format_value(entry)}"
                self.problems.append(replace(place, message=message))


def _blame(problem: Problem, entry: Problem | None) -> Problem:
    """Move the blame for a file that cannot be read at all to the entry that names it."""
    if problem.line or not entry:
        return problem
    return replace(entry, message=f"{problem.file} {problem.message}", hint=problem.hint)


SET = "--set"


def apply_override(tree: Tree, override: str) -> None:
    """Merge one `key=value` into the tree.

    The value is TOML; a bare word is a string. A number in the key picks an entry of a list, and
    the number one past its end adds one.

    Raises:
        RecipeError: it is not `key=value`, or the key leads through something that is no table.
    """
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise _fault("expected KEY=VALUE, such as optimizer.lr=1e-4", override)
    if len(parts) > MAX_DEPTH or parts[0] == "extends":
        raise _fault("this key cannot be set", key)
    value = _parse(text.strip(), key)
    tree.num_layers += 1
    origin = Origin(SET, layer=tree.num_layers)
    path: KeyPath = ()
    for part in parts[:-1]:
        path = _enter(tree, path, part, origin)
    path = (*path, _index(tree, path, parts[-1]))
    origins = dict.fromkeys(key_paths(value, path), origin)
    if isinstance(path[-1], str):
        tree.merge({path[-1]: value}, origins, path[:-1])
    else:
        tree.replace(path, value, origins)


def _fault(message: str, key: str, hint: str = "") -> RecipeError:
    return RecipeError([Problem(message, shorten(make_printable(key)), SET, hint=hint)])


def _parse(text: str, key: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
        value = parsed.pop("value")
        # The text of a shell may hold a line break, and below it a second key.
        if parsed:
            raise _fault("expected one value", key)
    except tomli.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise _fault(
                f"{format_value(text)} is not TOML: {make_printable(error.msg)}", key
            ) from None
        value = text
    except (RecursionError, ValueError):
        raise _fault("the value is nested too deep or too long", key) from None
    for path, message in unusable_values(value):
        raise _fault(message, ".".join([key, *map(str, path)]))
    return value


def _enter(tree: Tree, path: KeyPath, part: str, origin: Origin) -> KeyPath:
    """Return the path of the table or list below `path`, which is created if it is missing."""
    here = (*path, _index(tree, path, part))
    container = tree.at(path)
    if here[-1] == len(container) if isinstance(container, list) else part not in container:
        value = default_tables(tree.values, here)
        tree.replace(here, value, dict.fromkeys(key_paths(value, here), origin))
    if not isinstance(tree.at(here), dict | list):
        found = f"{format_key(here)} is {format_value(tree.at(here))}"
        raise _fault(f"expected a table, but {found}", format_key(here))
    return here


def _index(tree: Tree, path: KeyPath, part: str) -> str | int:
    """Return `part` as a key of the table, or as an index of the list, at `path`."""
    container = tree.at(path)
    if isinstance(container, dict):
        return part
    # Few digits: Python raises an error for numbers of thousands.
    if part.isdecimal() and len(part) < 10 and int(part) <= len(container):
        return int(part)
    raise _fault(
        f"expected the number of an entry (0 to {len(container)}), got {format_value(part)}",
        format_key((*path, part)),
    )
