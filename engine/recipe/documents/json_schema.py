"""The recipe's JSON Schema, for editors."""

from __future__ import annotations

import json
from typing import Any

from ...core.models import models
from ..schema import Recipe
from .reference import EXTENDS

_PATH = {"type": "string", "pattern": r"\.toml$"}
_EXTENDS = {
    "anyOf": [{"type": "array", "items": _PATH}, _PATH],
    "description": EXTENDS.description,
}


def json_schema() -> dict[str, Any]:
    """Return the schema of every table and every registered component."""
    schema = _tidy(Recipe.model_json_schema())
    for option in schema["properties"]["model"]["oneOf"]:
        sizes = option["properties"]
        sizes["flavor"]["enum"] = list(models[sizes["name"]["const"]].flavors)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trainer recipe",
        **schema,
        "properties": {"extends": _EXTENDS, **schema["properties"]},
    }


def schema_text() -> str:
    """Return the schema as it is kept in `recipes/schema.json`."""
    return json.dumps(json_schema(), indent=1) + "\n"


def _tidy(node: Any) -> Any:
    """Take out null, which TOML cannot write, and what repeats: titles, defaults of tables."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {
        key: {name: _tidy(each) for name, each in value.items()}
        if key in ("properties", "$defs")
        else _tidy(value)
        for key, value in node.items()
    }
    tidy.pop("title", None)
    if "description" in node:
        tidy["description"] = " ".join(node["description"].split())
    if tidy.get("default", "") is None or isinstance(tidy.get("default"), dict | list):
        del tidy["default"]
    options = [option for option in tidy.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del tidy["anyOf"]
        tidy |= options[0]
    elif options:
        tidy["anyOf"] = options
    return tidy
