"""The resolved recipe, and where each value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.text.positions import KeyPath
from ..core.text.shown import dotted
from ..core.text.tree import leaves
from .load import Loaded


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
        Explained(dotted(path), value, _origin(loaded, path, value))
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
