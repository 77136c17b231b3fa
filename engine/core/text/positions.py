"""Where each key of a TOML text stands."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

import tomli

KeyPath = tuple[str | int, ...]

MAX_DEPTH = 32
MAX_KEYS = 100_000

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_PART = re.compile(r'[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
_SPACE = re.compile(r"[ \t]*")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_SCALAR = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"{1,2}(?!"))[^"\\]*)*"{3,5}'
    r"|'''[^']*(?:'{1,2}(?!')[^']*)*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\d{4}-\d\d-\d\d \d[\d:.+\-Zz]*"
    r"|[^\s,\]}#]+",
    re.DOTALL,
)


class SizeError(ValueError):
    """The text nests deeper or holds more keys than a recipe may."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class Positions:
    """Line and column (both from 1) of every key and array element of a valid TOML text.

    Raises:
        SizeError: more than `MAX_DEPTH` levels or `MAX_KEYS` keys.
        ValueError: the text is not TOML (only what the scan trips over; tomli is the judge).
    """

    def __init__(self, text: str) -> None:
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._offsets: dict[KeyPath, int] = {}
        _Scan(text, self).document()

    def __getitem__(self, path: KeyPath) -> tuple[int, int]:
        return self.place(self._offsets[path])

    def items(self) -> Iterator[tuple[KeyPath, tuple[int, int]]]:
        """Yield every key path with its line and column."""
        for path, offset in self._offsets.items():
            yield path, self.place(offset)

    def place(self, offset: int) -> tuple[int, int]:
        """Return line and column of a character."""
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1

    def add(self, path: KeyPath, offset: int, *, defines: bool = True) -> None:
        """Note where `path` is defined, or first mentioned on the way to a deeper key."""
        if len(path) > MAX_DEPTH:
            raise SizeError(f"nested deeper than {MAX_DEPTH} levels", *self.place(offset))
        if len(self._offsets) >= MAX_KEYS:
            raise SizeError(f"more than {MAX_KEYS} keys", *self.place(offset))
        if defines or path not in self._offsets:
            self._offsets[path] = offset


class _Scan:
    """One pass over the text. It trusts the grammar: tomli has accepted the text before."""

    def __init__(self, text: str, positions: Positions) -> None:
        self.text = text
        self.at = 0
        self.positions = positions
        self.table_counts: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self.header()
            else:
                self.pair(table)
            self.skip(_BLANK)

    def header(self) -> KeyPath:
        """Read `[a.b]` or `[[a.b]]` and return the path of the table that it opens."""
        is_array = self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        parts = self.key()
        path: KeyPath = ()
        for index, (part, offset) in enumerate(parts):
            path = (*path, part)
            is_last = index == len(parts) - 1
            self.positions.add(path, offset, defines=is_last and not is_array)
            if is_last and is_array:
                self.table_counts[path] = self.table_counts.get(path, 0) + 1
            if path in self.table_counts:
                path = (*path, self.table_counts[path] - 1)
                self.positions.add(path, offset, defines=is_last)
        self.take("]]" if is_array else "]")
        return path

    def pair(self, table: KeyPath) -> None:
        """Read `a.b = value` inside `table`."""
        parts = self.key()
        path = table
        for index, (part, offset) in enumerate(parts):
            path = (*path, part)
            self.positions.add(path, offset, defines=index == len(parts) - 1)
        self.skip(_EQUALS)
        self.value(path)

    def key(self) -> list[tuple[str, int]]:
        """Read a dotted key: its parts and where each starts."""
        parts = []
        self.skip(_SPACE)
        while True:
            offset = self.at
            raw = self.skip(_PART)
            if not raw:
                raise ValueError("not a key")
            parts.append((_unquote(raw), offset))
            if len(parts) > MAX_DEPTH:
                raise SizeError(
                    f"nested deeper than {MAX_DEPTH} levels", *self.positions.place(parts[0][1])
                )
            if not self.skip(_DOT):
                self.skip(_SPACE)
                return parts

    def value(self, path: KeyPath) -> None:
        if self.text.startswith("[", self.at):
            self.items("]", path)
        elif self.text.startswith("{", self.at):
            self.items("}", path)
        elif not self.skip(_SCALAR):
            raise ValueError("not a value")

    def items(self, end: str, path: KeyPath) -> None:
        """Read an array (`end` is `]`) or an inline table below `path`."""
        self.at += 1
        index = 0
        while True:
            self.skip(_BLANK)
            if self.text.startswith(end, self.at):
                self.at += 1
                return
            if end == "]":
                self.positions.add((*path, index), self.at)
                self.value((*path, index))
            else:
                self.pair(path)
            index += 1
            self.skip(_BLANK)
            if not self.text.startswith(end, self.at):
                self.take(",")

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Step over what the pattern matches here, and return it."""
        match = pattern.match(self.text, self.at)
        if not match:
            return ""
        self.at = match.end()
        return match[0]

    def take(self, word: str) -> None:
        if not self.text.startswith(word, self.at):
            raise ValueError(f"no {word}")
        self.at += len(word)


def _unquote(raw: str) -> str:
    if raw[0] not in "\"'":
        return raw
    if raw[0] == '"' and "\\" in raw:
        # tomli knows TOML's escapes.
        return next(iter(tomli.loads(f"{raw} = 0")))
    return raw[1:-1]
