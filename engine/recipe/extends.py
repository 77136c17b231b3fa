"""A recipe file and everything that it extends, read into one tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..core.errors import Problem, RecipeError
from ..core.files import address_problem
from ..core.text.positions import KeyPath
from ..core.text.printable import printable
from ..core.text.shown import shown_key, shown_value
from ..core.text.tree import Origin, Tree
from .read import TomlFile, read_toml

MAX_DEPTH = 16
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
    """Reads depth first, so that what is extended is laid down before what extends it."""

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
            names = [printable(each.name) for each in [*chain[chain.index(real) :], real]]
            message = f"extends in a circle: {' -> '.join(names)}"
        elif len(chain) > MAX_DEPTH:
            message = f"extends deeper than {MAX_DEPTH} files"
        elif self.num_files > MAX_FILES:
            message = f"extends more than {MAX_FILES} files in all"
        if message:
            raise RecipeError([replace(entry, message=message)])

    def _extended(self, file: TomlFile) -> Iterator[tuple[str, Problem]]:
        """Yield the entries of `extends`, each with its place; note the unusable ones."""
        entries = file.tree.get("extends", [])
        keyed: list[tuple[KeyPath, object]] = [(("extends",), entries)]
        if isinstance(entries, list):
            keyed = [(("extends", index), entry) for index, entry in enumerate(entries)]
        for key, entry in keyed:
            place = Problem("", shown_key(key), file.name, *file.positions[key])
            if isinstance(entry, str) and (problem := address_problem(entry)):
                self.problems.append(replace(place, message=printable(problem)))
            elif isinstance(entry, str) and entry.endswith(".toml"):
                yield entry, place
            else:
                message = f"expected the path of a .toml file, got {shown_value(entry)}"
                self.problems.append(replace(place, message=message))


def _blame(problem: Problem, entry: Problem | None) -> Problem:
    """Move the blame for a file that cannot be read at all to the entry that names it."""
    if problem.line or not entry:
        return problem
    return replace(entry, message=f"{problem.file} {problem.message}", hint=problem.hint)
