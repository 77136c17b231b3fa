"""`--set key=value`: the last layer of a recipe."""

from __future__ import annotations

from typing import Any

import tomli

from ..core.errors import Problem, RecipeError
from ..core.text.positions import MAX_DEPTH, KeyPath
from ..core.text.printable import printable
from ..core.text.shown import shorten, shown_key, shown_value
from ..core.text.tree import Origin, Tree, key_paths
from .read import unusable_values
from .structure import default_tables

SET = "--set"


def apply_override(tree: Tree, override: str) -> None:
    """Lay one `key=value` over the tree.

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
    return RecipeError([Problem(message, shorten(printable(key)), SET, hint=hint)])


def _parse(text: str, key: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
        value = parsed.pop("value")
        if parsed:
            raise _fault("expected one value", key)
    except tomli.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise _fault(f"{shown_value(text)} is not TOML: {printable(error.msg)}", key) from None
        value = text
    except (RecursionError, ValueError):
        raise _fault("the value is nested too deep or too long", key) from None
    for path, message in unusable_values(value):
        raise _fault(message, ".".join([key, *map(str, path)]))
    return value


def _enter(tree: Tree, path: KeyPath, part: str, origin: Origin) -> KeyPath:
    """Return the path of the table or list below `path`, made if nobody has."""
    here = (*path, _index(tree, path, part))
    container = tree.at(path)
    if here[-1] == len(container) if isinstance(container, list) else part not in container:
        value = default_tables(tree.values, here)
        tree.replace(here, value, dict.fromkeys(key_paths(value, here), origin))
    if not isinstance(tree.at(here), dict | list):
        found = f"{shown_key(here)} is {shown_value(tree.at(here))}"
        raise _fault(f"expected a table, but {found}", shown_key(here))
    return here


def _index(tree: Tree, path: KeyPath, part: str) -> str | int:
    """Return `part` as a key of the table, or as an index of the list, at `path`."""
    container = tree.at(path)
    if isinstance(container, dict):
        return part
    if part.isdecimal() and len(part) < 10 and int(part) <= len(container):
        return int(part)
    message = f"expected the number of an entry (0 to {len(container)}), got {shown_value(part)}"
    raise _fault(message, shown_key((*path, part)))
