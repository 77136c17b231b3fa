"""Recipes as TOML text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.text.positions import KeyPath
from ..core.text.redact import without_secrets
from ..core.text.shown import quoted_part
from .schema import Recipe

Comment = Callable[[KeyPath], str]
"""key path -> text of the comment above it, or an empty string"""


def to_toml(recipe: Recipe) -> str:
    """Return the resolved recipe: every key spelled out, except those without a value.

    Passwords and keys are left out: the text is for a file that others may read.
    """
    return format_toml(without_secrets(recipe.model_dump()))


def format_toml(values: Mapping[str, Any], comment: Comment = lambda _path: "") -> str:
    """Return a tree of tables as TOML; values that are None are left out."""
    return "\n".join(_table(values, (), comment)).strip("\n") + "\n"


def _table(values: Mapping[str, Any], path: KeyPath, comment: Comment) -> Iterator[str]:
    """Yield the lines of a table: plain values first, as TOML wants it, then tables."""
    tables = {key: value for key, value in values.items() if is_table(value)}
    for key, value in values.items():
        if key not in tables and value is not None:
            yield from _comment_lines(comment((*path, key)))
            yield f"{quoted_part(key)} = {toml_value(value)}"
    for key, value in tables.items():
        here = (*path, key)
        for item in value if isinstance(value, list) else [value]:
            name = ".".join(quoted_part(part) for part in here)
            yield ""
            yield from _comment_lines(comment(here))
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _table(item, here, comment)


def is_table(value: Any) -> bool:
    """Return whether TOML writes a value as a table, or as a list of tables."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _comment_lines(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in text.splitlines())


def toml_value(value: Any) -> str:
    """Return a plain value as TOML writes it, in one line."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        pairs = (f"{quoted_part(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)
