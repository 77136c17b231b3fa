"""Fragments of the weights, of which each round merges one (Streaming DiLoCo, arXiv:2501.18512)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...core.errors import Problem, RecipeError
from .tables import Fragments

_BLOCK = re.compile(r"(.*?\.\d+)\.")


def divide_weights(names: Iterable[str], table: Fragments) -> list[frozenset[str]]:
    """Return the names of the weights of each fragment.

    The units that are divided are blocks, whose names have a number (`layers.3`), and weights
    outside of them; in the order of the model.

    Args:
        names: the names of all trained weights, in the order of the model.
        table: the recipe's `[federation.fragments]`.

    Raises:
        RecipeError: there are fewer units than fragments.
    """
    units: dict[str, list[str]] = {}
    for name in names:
        block = _BLOCK.match(name)
        units.setdefault(block[1] if block else name, []).append(name)
    if len(units) < table.count:
        message = f"{table.count} fragments of a model that has {len(units)} blocks and weights"
        problem = Problem(message, "federation.fragments.count", hint=f"at most {len(units)}")
        raise RecipeError([problem])
    fragments: list[set[str]] = [set() for _ in range(table.count)]
    for index, members in enumerate(units.values()):
        is_strided = table.pattern == "strided"
        which = index % table.count if is_strided else index * table.count // len(units)
        fragments[which].update(members)
    return [frozenset(fragment) for fragment in fragments]
