"""Which names of a file are taken, and what they are called here. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import Problem, RecipeError, nearest
from .expressions import ExpressionError, compile_expression, match_names


class Renaming(NamedTuple):
    """A pattern of names in a file, and what such names are called here."""

    match: str
    """a glob with `*`, or `re:` and a regular expression that matches a whole name"""
    to: str
    """the name here: each `*` stands for what a `*` of the glob matched, `\\1` for a group"""


@dataclass(frozen=True)
class NameSelection:
    """Names that are left out, and names that differ between a file and this program.

    Attributes:
        exclude: patterns of names here, as `match_names` takes them.
        renamings: the first that matches a name of the file renames it.
        key: the recipe's table that gives both, for messages.
    """

    exclude: Sequence[str] = ()
    renamings: Sequence[Renaming] = ()
    key: str = ""

    def excludes(self, name: str) -> bool:
        """Return whether a name here is left out."""
        return any(match_names(pattern)(name) for pattern in self.exclude)

    def rename(self, name: str) -> str:
        """Return what a name of the file is called here."""
        for renaming in self.renamings:
            renamed = rename_function(renaming)(name)
            if renamed is not None:
                return renamed
        return name

    def require_used(self, here: Collection[str], there: Collection[str]) -> None:
        """Check that each pattern matches a name.

        Args:
            here: the names of this program.
            there: the names of the file, before they are renamed.

        Raises:
            RecipeError: some match none.
        """
        problems = []
        names = {*here, *map(self.rename, there)}
        for index, pattern in enumerate(self.exclude):
            if not any(map(match_names(pattern), names)):
                problems.append(_unmatched(f"{self.key}.exclude.{index}", pattern, names))
        for index, renaming in enumerate(self.renamings):
            rename = rename_function(renaming)
            if all(rename(name) is None for name in there):
                place = f"{self.key}.rename.{index}.match"
                problems.append(_unmatched(place, renaming.match, there))
        if problems:
            raise RecipeError(problems)


def rename_function(renaming: Renaming) -> Callable[[str], str | None]:
    """Return a function from a name to the new name; None for a name that does not match.

    Raises:
        ExpressionError: the pattern or what it becomes cannot be used.
    """
    pattern, to = renaming
    if pattern.startswith("re:"):
        expression = compile_expression(pattern[3:])
    else:
        expression = compile_expression("(.*)".join(map(re.escape, pattern.split("*"))))
        if to.count("*") > pattern.count("*"):
            raise ExpressionError(f'"{to}" has more * than "{pattern}"')
        first, *others = to.replace("\\", "\\\\").split("*")
        to = first + "".join(f"\\{number}{text}" for number, text in enumerate(others, 1))
    groups = [int(number) for number in re.findall(r"\\(\d)", to)]
    if max(groups, default=0) > expression.groups:
        raise ExpressionError(f'"{to}" names a group that "{pattern}" does not have')

    def rename(name: str) -> str | None:
        found = expression.fullmatch(name)
        if not found:
            return None
        return re.sub(r"\\(\d)", lambda each: found.group(int(each[1])) or "", to)

    return rename


def _unmatched(key: str, pattern: str, names: Collection[str]) -> Problem:
    some = sorted(names)
    hint = nearest(pattern, names) or f"names are like {some[0]} and {some[-1]}" if some else ""
    return Problem(f'"{pattern}" matches no weight', key, hint=hint)
