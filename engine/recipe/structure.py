"""What may stand where in a recipe: the tree of config classes, read from the schema."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..core.config import RelativeToRecipe
from ..core.registry import Named, Registry
from ..core.text.positions import KeyPath
from .schema import Recipe
from .tables import RegisteredTables

TableClass = type[BaseModel]


@dataclass(frozen=True)
class Slot:
    """What a field holds: plain values, or tables of one class or one registry."""

    table: TableClass | None = None
    registry: Registry[Any] | None = None
    is_list: bool = False
    is_path: bool = False
    or_hub_id: bool = False

    def class_of(self, value: Any) -> TableClass | None:
        """Return the config class of a table given here, or None if its `name` is unknown."""
        if self.registry is None:
            return self.table
        name = value.get("name", self.registry.default) if isinstance(value, dict) else None
        if isinstance(name, str) and name in self.registry:
            return self.registry[name]
        return None


def slot(field: FieldInfo) -> Slot:
    """Return what a field holds."""
    return _slot(field.annotation, field.metadata)


def _slot(annotation: Any, metadata: list[Any]) -> Slot:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _slot(inner, [*metadata, *more])
    for item in metadata:
        if isinstance(item, Named):
            return Slot(registry=item.registry)
        if isinstance(item, RegisteredTables):
            return Slot(table=item.table())
        if isinstance(item, RelativeToRecipe):
            return Slot(is_path=True, or_hub_id=item.or_hub_id)
    if origin is list:
        inner_slot = _slot(get_args(annotation)[0], [])
        return replace(inner_slot, is_list=True)
    if origin in (Union, UnionType):
        # Of a table or None, and of a table or a list of tables, the option with tables counts.
        slots = [_slot(option, []) for option in get_args(annotation)]
        return next((each for each in slots if each != Slot()), Slot())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Slot(table=annotation)
    return Slot()


@dataclass(frozen=True)
class GivenTable:
    """A table that a recipe gives, and the class that its keys belong to."""

    path: KeyPath
    values: dict[str, Any]
    config: TableClass
    registry: Registry[Any] | None = None


def given_tables(values: dict[str, Any]) -> Iterator[GivenTable]:
    """Yield the root and every table below it that the recipe gives and whose class is known."""
    yield from _tables(GivenTable((), values, Recipe), missing=None)


def every_table(values: dict[str, Any]) -> Iterator[GivenTable]:
    """Yield what `given_tables` does, and the tables that the recipe leaves out."""
    yield from _tables(GivenTable((), values, Recipe), missing={})


def table_at(values: dict[str, Any], path: KeyPath) -> GivenTable | None:
    """Return the given table at `path`, or None if its class is not known."""
    return next((each for each in given_tables(values) if each.path == path), None)


def _tables(table: GivenTable, missing: dict[str, Any] | None) -> Iterator[GivenTable]:
    yield table
    for key, field in table.config.model_fields.items():
        here = slot(field)
        value = table.values.get(key, missing)
        items: list[tuple[KeyPath, Any]] = [((*table.path, key), value)]
        if here.is_list:
            listed = value if isinstance(value, list) else []
            items = [((*table.path, key, index), item) for index, item in enumerate(listed)]
        for path, item in items:
            config = here.class_of(item) if isinstance(item, dict) else None
            if config:
                yield from _tables(GivenTable(path, item, config, here.registry), missing)


@cache
def describe_fields(config: TableClass) -> dict[str, str]:
    """Return the docstring below each field of a table, by key; empty where there is none.

    They are read from the source when they are asked for. With pydantic's own
    `use_attribute_docstrings` every class is parsed when it is defined, which takes most of the
    time of a start.
    """
    found: dict[str, str] = {}
    # Base classes first: a field that a subclass declares again has the subclass's docstring.
    for base in reversed(config.__mro__):
        docstrings = _field_docstrings(base.__module__).get(base.__qualname__, {})
        found |= {key: docstrings.get(key, "") for key in inspect.get_annotations(base)}
    # Tables that are made by a program have no source, and say it in the field.
    fields = config.model_fields.items()
    return {key: found.get(key) or field.description or "" for key, field in fields}


@cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of each class at the top level of a module."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # typed in, or made by a program
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            docstrings = found[node.name] = {}
            for statements in pairwise(node.body):
                match statements:
                    case ast.AnnAssign(target=ast.Name(key)), ast.Expr(ast.Constant(str(text))):
                        docstrings[key] = inspect.cleandoc(text)
    return found


def default_tables(values: dict[str, Any], path: KeyPath) -> list[Any] | dict[str, Any]:
    """Return what `--set` changes at a key that no file gives: the default list, or {}."""
    for table in given_tables(values):
        field = table.config.model_fields.get(str(path[-1]))
        if table.path == path[:-1] and field and slot(field).is_list:
            default = [] if field.is_required() else field.get_default(call_default_factory=True)
            return [_as_written(item) for item in default]
    return {}


def _as_written(item: Any) -> Any:
    if not isinstance(item, BaseModel):
        return item
    return item.model_dump(include={"name"} | item.model_fields_set)
