"""What no table can see alone."""

from __future__ import annotations

from .positions import KeyPath
from .schema import Recipe

Finding = tuple[KeyPath, str, str]


def check(recipe: Recipe, world: int | None = None) -> list[Finding]:
    """Return what does not fit together: key, message and hint of each."""
    return []
