"""The merged values of a recipe, in which every key knows who wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Problem
from .display import format_key
from .positions import KeyPath

Finding = tuple[KeyPath, str, str]
"""key, message and hint of something that does not fit"""


@dataclass(frozen=True)
class Origin:
    """The place where a key was written."""

    file: str
    """a file's name, or `--set`"""
    line: int = 0
    column: int = 0
    layer: int = 0
    """later layers win"""
    folder: Path = Path()
    """where relative paths of this origin start"""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass
class Tree:
    """The merged values, and the origin of each key."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    num_layers: int = 0

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of a key, or of the nearest table above it that has one."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins[path]

    def problem(self, path: KeyPath, message: str, hint: str = "") -> Problem:
        """Return a problem at a key."""
        origin = self.origin(path)
        return Problem(message, format_key(path), origin.file, origin.line, origin.column, hint)

    def merge(
        self, above: Mapping[str, Any], origins: Mapping[KeyPath, Origin], path: KeyPath = ()
    ) -> None:
        """Merge a layer into the table at `path`: tables merge, all other values are replaced."""
        below = self.at(path)
        for key, value in above.items():
            here = (*path, key)
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                self.origins[here] = origins[here]
                self.merge(value, origins, here)
            else:
                self.replace(here, value, origins)

    def replace(self, path: KeyPath, value: Any, origins: Mapping[KeyPath, Origin]) -> None:
        """Put `value` at a key whose table or list exists; a list may grow by one."""
        container = self.at(path[:-1])
        key = path[-1]
        if isinstance(container, list) and key == len(container):
            container.append(value)
        else:
            self.forget(path)
            container[key] = value
        self.origins |= {inner: origins[inner] for inner in key_paths(value, path)}

    def remove(self, path: KeyPath) -> None:
        """Remove a key."""
        self.forget(path)
        del self.at(path[:-1])[path[-1]]

    def forget(self, path: KeyPath) -> None:
        """Drop the origins of a key and of all below it."""
        container = self.at(path[:-1])
        old = container.get(path[-1]) if isinstance(container, dict) else container[path[-1]]
        for inner in key_paths(old, path):
            self.origins.pop(inner, None)

    def at(self, path: KeyPath) -> Any:
        """Return the value at a key path."""
        value: Any = self.values
        for part in path:
            value = value[part]
        return value


def key_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield `path` and every key path below it."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from key_paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from key_paths(inner, (*path, index))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that holds no table, with its key path; lists of plain values are one."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value
