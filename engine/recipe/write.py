"""A recipe as TOML text, and as a list of keys with where each value came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ..core.config import Component
from ..core.text.display import join_key, quote_part, remove_secrets
from ..core.text.positions import KeyPath
from ..core.text.tree import leaves
from .load import Loaded
from .schema import Recipe

Comment = Callable[[KeyPath], str]
"""key path -> text of the comment above it, or an empty string"""


def to_toml(recipe: Recipe) -> str:
    """Return the resolved recipe: every key spelled out, except those without a value.

    Passwords and keys are left out: the text is for a file that others may read.
    """
    return format_toml(remove_secrets(recipe.model_dump()))


def changed_values(table: BaseModel) -> dict[str, Any]:
    """Return the values of a table that differ from its defaults, as nested plain data.

    Args:
        table: a recipe, or one of its tables. Of a component its name stands beside the values.
    """
    changed: dict[str, Any] = {}
    for key, field in type(table).model_fields.items():
        value = getattr(table, key)
        if isinstance(value, BaseModel):
            if inner := changed_values(value):
                name = {"name": value.name} if isinstance(value, Component) else {}
                changed[key] = name | inner
        elif value != field.get_default(call_default_factory=True):
            changed[key] = table.model_dump(mode="json", include={key})[key]
    return changed


def format_toml(values: Mapping[str, Any], comment: Comment = lambda _path: "") -> str:
    """Return a tree of tables as TOML; values that are None are left out."""
    return "\n".join(_table(values, (), comment)).strip("\n") + "\n"


def _table(values: Mapping[str, Any], path: KeyPath, comment: Comment) -> Iterator[str]:
    """Yield the lines of a table: plain values first, as TOML wants it, then tables."""
    tables = {key: value for key, value in values.items() if is_table(value)}
    for key, value in values.items():
        if key not in tables and value is not None:
            yield from _comment_lines(comment((*path, key)))
            yield f"{quote_part(key)} = {toml_value(value)}"
    for key, value in tables.items():
        here = (*path, key)
        for item in value if isinstance(value, list) else [value]:
            name = ".".join(quote_part(part) for part in here)
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
        pairs = (f"{quote_part(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    # Of a float the shortest digits that give the same bits back; recipes have no inf and nan.
    return repr(value)


@dataclass(frozen=True)
class Explained:
    """One key of a resolved recipe."""

    key: str
    value: Any
    origin: str
    """`file:line`, `--set`, `the file's name`, `flavor "8b"`, `from tokenizer` or `default`"""


def explain(loaded: Loaded) -> list[Explained]:
    """Return every key of the recipe, every default spelled out."""
    return [
        Explained(join_key(path), value, _origin(loaded, path, value))
        for path, value in leaves(loaded.recipe.model_dump())
    ]


def _origin(loaded: Loaded, path: KeyPath, value: Any) -> str:
    # `--set` may have replaced one entry of a list that a file wrote.
    paths = [path, *((*path, index) for index in range(_length(value)))]
    written = [loaded.tree.origins[each] for each in paths if each in loaded.tree.origins]
    if written:
        return str(max(written, key=lambda origin: origin.layer))
    model = loaded.recipe.model
    if path[0] == "model" and path[1] in model.flavors.get(model.flavor, {}):
        return f'flavor "{model.flavor}"'
    if path == ("model", "vocab_size"):
        return "from tokenizer"
    return "default"


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple) else 0
