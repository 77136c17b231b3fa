"""The keys of tables in words, and as the JSON Schema that editors check recipes by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from ...core.config import OneOf
from ...core.registry import Named, models
from ...core.text.display import format_value
from ..schema import Recipe
from ..structure import describe_fields

_WORDS = {bool: "true or false", int: "integer", float: "number", str: "string"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class FieldDescription:
    """One key of a table."""

    key: str
    type: str
    default: str
    """as TOML writes it; `required`, or `none`"""
    description: str


@dataclass(frozen=True)
class Key:
    """One key of one section, with everything that `trainer docs` prints about it."""

    key: str
    component: str
    type: str
    default: str
    description: str
    on_resume: str
    recipes: dict[str, str]
    """shipped recipe -> the value that it gives"""


EXTENDS = Key(
    key="extends",
    component="",
    type="list of strings",
    default="[]",
    description="recipes that this one changes: paths relative to this file, the last wins",
    on_resume="may change",
    recipes={},
)
"""It stands above all tables, and belongs to none."""


def summary(config: type[BaseModel]) -> str:
    """Return the first paragraph of a config class's docstring, in one line."""
    return " ".join((config.__doc__ or "").split("\n\n")[0].split())


def describe(config: type[BaseModel]) -> list[FieldDescription]:
    """Return the keys of a table, in the order of its class."""
    descriptions = describe_fields(config)
    return [
        FieldDescription(
            key,
            _type(field.annotation, field.metadata),
            _default(field),
            " ".join(descriptions[key].split()),
        )
        for key, field in config.model_fields.items()
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    if isinstance(default, list):
        return f"[{', '.join(map(_item, default))}]"
    # The mark of `DEFAULTS`: the table has a section of its own, with the defaults of its keys.
    if default == {}:
        return "see there" if field.validate_default else "{}"
    return "see there" if isinstance(default, BaseModel) else format_value(default)


def _item(value: Any) -> str:
    """Return an item of a default list as TOML; a component's table is reduced to its name."""
    return f'{{ name = "{value["name"]}" }}' if isinstance(value, dict) else format_value(value)


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _type(inner, [*metadata, *more])
    for item in metadata:
        if isinstance(item, OneOf):
            return " | ".join(map(format_value, item.words()))
    named = next((item for item in metadata if isinstance(item, Named)), None)
    if named:
        return f"table ({named.registry.kind})"
    if origin in (Union, UnionType):
        options = [each for each in get_args(annotation) if each is not NoneType]
        return " or ".join(_type(option, metadata) for option in options)
    if origin is Literal:
        return " | ".join(format_value(word) for word in get_args(annotation))
    if origin is list:
        item = _type(get_args(annotation)[0], [])
        return f"list of {item.replace('table', 'tables').replace('string', 'strings')}"
    if origin in (dict, Mapping):
        return "table"
    if origin is tuple:
        first, *more = get_args(annotation)
        return f"list of {1 + len(more)}: {_type(first, [])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    bounds = ", ".join(_bounds(metadata))
    return f"{_WORDS.get(annotation, 'value')} {bounds}".strip()


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        for name, sign in _BOUNDS.items():
            bound = getattr(item, name, None)
            # Bounds that only keep arithmetic from overflowing say nothing to a reader.
            if bound is not None and bound < 1e6:
                yield f"{sign} {bound:g}"


_PATH = {"type": "string", "pattern": r"\.toml$"}
_EXTENDS = {
    "anyOf": [{"type": "array", "items": _PATH}, _PATH],
    "description": EXTENDS.description,
}


def json_schema() -> dict[str, Any]:
    """Return the schema of every table and every registered component."""
    schema = _tidy(Recipe.model_json_schema(schema_generator=_DescribedTables))
    for option in schema["properties"]["model"]["oneOf"]:
        sizes = option["properties"]
        # To pydantic a flavor is any text, because each family has its own names.
        sizes["flavor"]["enum"] = list(models[sizes["name"]["const"]].flavors)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trainer recipe",
        **schema,
        "properties": {"extends": _EXTENDS, **schema["properties"]},
    }


class _DescribedTables(GenerateJsonSchema):
    """Adds the description of each field, which pydantic does not know."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Return the schema of a table."""
        table, config = super().model_schema(schema), cast("type[BaseModel]", schema["cls"])
        for key, text in describe_fields(config).items():
            if text:
                table["properties"][key]["description"] = text
        return table


def schema_text() -> str:
    """Return the schema as it is kept in `recipes/schema.json`."""
    return json.dumps(json_schema(), indent=1) + "\n"


def _tidy(node: Any) -> Any:
    """Return a schema without null, which TOML cannot write, titles, and defaults of tables."""
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
