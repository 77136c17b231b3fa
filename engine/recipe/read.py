"""Read one TOML file of limited size, and report every fault with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from ..core.errors import Problem, RecipeError
from ..core.files import UnusableFile, open_regular
from ..core.text.display import MARK, format_key, make_printable
from ..core.text.positions import MAX_DEPTH, KeyPath, Positions, SizeError

MAX_BYTES = 1_000_000
RECIPES = Path(__file__).parents[2] / "recipes"
OTHER_FORMATS = {".yaml", ".yml", ".json", ".py"}
MAX_DIGITS = 4000  # a little less than what Python converts
_TOMLI_WORDS = {
    "Cannot overwrite a value": "this key is given twice",
    "Invalid statement": "expected a key or a table",
    "Invalid value": "expected a value",
    "Illegal character '\\n'": "the string does not end on its line",
}
INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class TomlFile:
    """A parsed file and where its keys stand."""

    name: str
    folder: Path
    tree: dict[str, Any]
    positions: Positions


def read_toml(path: Path) -> TomlFile:
    """Parse a file of at most 1 MB; a byte-order mark is accepted.

    Raises:
        RecipeError: located faults; a file that cannot be read at all has line 0.
    """
    name = make_printable(str(path))
    if path.suffix.lower() in OTHER_FORMATS:
        raise _fault(
            "a recipe is a TOML file", name, 0, 0, "trainer new PATH --from NAME writes one"
        )
    text = _decode(_read_bytes(path, name), name)
    tree = _parse(text, name)
    try:
        positions = Positions(text)
    except SizeError as error:
        raise _fault(str(error), name, error.line, error.column) from None
    problems = [
        Problem(message, format_key(key), name, *positions[key])
        for key, message in unusable_values(tree)
    ]
    if problems:
        raise RecipeError(problems)
    return TomlFile(name, path.parent, tree, positions)


def _fault(message: str, name: str, line: int, column: int, hint: str = "") -> RecipeError:
    return RecipeError([Problem(message, "", name, line, column, hint)])


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        with open_regular(path) as file:
            # One byte more than allowed shows that the file is too large, whatever its size is said
            # to be.
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _fault("there is no such file", name, 0, 0, _sibling(path)) from None
    except UnusableFile as error:
        raise _fault(str(error.strerror), name, 0, 0) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _fault(f"cannot be read: {reason}", name, 0, 0) from None
    if len(data) > MAX_BYTES:
        raise _fault(f"is larger than a recipe may be ({MAX_BYTES:,} bytes)", name, 0, 0)
    return data


def _sibling(path: Path) -> str:
    """Return a hint at the shipped recipe of that name, or at the nearest name in the folder."""
    if (RECIPES / f"{path.stem}.toml").is_file():
        return f"a shipped recipe: trainer new {path.stem}.toml --from {path.stem}"
    names = [each.stem for each in path.parent.glob("*.toml")]
    close = get_close_matches(path.stem, names, n=1)
    return f'did you mean "{make_printable(str(path.with_name(close[0])))}.toml"?' if close else ""


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise _fault(
            f"byte 0x{data[error.start]:02x} is not UTF-8", name, before.count(b"\n") + 1, column
        ) from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        message = _reworded(error.msg)
        hint = _syntax_hint(error.msg, text[error.pos : error.pos + 40])
        raise _fault(make_printable(message), name, error.lineno, error.colno, hint) from None
    except RecursionError:
        line, column = _first_too_deep(text)
        raise _fault(f"nested deeper than {MAX_DEPTH} levels", name, line, column) from None
    except ValueError:
        # The one other fault of tomli: Python refuses to convert integers of many digits.
        # Run by run: a search for long ones would restart at each digit of a shorter one.
        runs = re.finditer(r"\d[\d_]*", text)
        offset = next((run.start() for run in runs if len(run[0]) > MAX_DIGITS), 0)
        line_start = text.rfind("\n", 0, offset) + 1
        line = text.count("\n", 0, offset) + 1
        raise _fault(
            "an integer must fit into 64 bits", name, line, offset - line_start + 1
        ) from None


def _reworded(message: str) -> str:
    """Return tomli's message in our words."""
    table = re.fullmatch(r"Cannot declare \((.+?),?\) twice", message)
    if table:
        return f"[{table[1].replace(', ', '.').replace(chr(39), '')}] is declared twice"
    return _TOMLI_WORDS.get(message, message[:1].lower() + message[1:])


def _syntax_hint(message: str, found: str) -> str:
    word = re.match(r"[A-Za-z_][\w./-]*", found)
    if message != "Invalid value" or not word:
        return ""
    if word[0].lower() in ("true", "false"):
        return f"write {word[0].lower()}"
    return f'text needs quotes: "{word[0]}"'


def _first_too_deep(text: str) -> tuple[int, int]:
    try:
        Positions(text)
    except SizeError as error:
        return error.line, error.column
    except ValueError:
        pass
    return 1, 1


def unusable_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield what TOML or a command line allows and no recipe can use."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from unusable_values(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from unusable_values(inner, (*path, index))
    elif isinstance(value, int) and value not in INT64:
        yield path, "an integer must fit into 64 bits"
    elif isinstance(value, str) and "\0" in value:
        yield path, "text must not hold the character U+0000"
    elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        yield path, "text must be UTF-8"
    elif isinstance(value, str) and MARK in value:
        yield path, f"a password or key was taken out here ({MARK}): write it again"
