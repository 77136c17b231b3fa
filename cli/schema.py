"""`trainer schema`: what editors check recipes by."""

from __future__ import annotations


def schema() -> None:
    """Print the JSON Schema of recipes, installed plugins included."""
    from ..engine.recipe.documents.describe import schema_text

    print(schema_text(), end="")
