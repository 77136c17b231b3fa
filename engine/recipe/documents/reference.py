"""The reference of recipes: every table, component and key, found by the names that people use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ...core.errors import nearest
from ...core.registry import Registry
from ...core.text.display import format_value
from ..changes import resume_policy
from ..layers import read_layers
from ..other_names import find_key, find_option
from ..read import RECIPES
from ..schema import REGISTRIES, Recipe
from ..structure import slot
from ..write import is_table
from .describe import EXTENDS, FieldDescription, Key, describe, summary
from .starter import shipped_recipes


@dataclass(frozen=True)
class Section:
    """A table of a recipe, as one component or, where there is nothing to choose, as itself."""

    table: str
    """dotted name without the numbers of lists, such as `data.sources`"""
    config: type[BaseModel]
    is_list: bool = False
    kind: str = ""
    """what kind of component, such as `source`"""
    component: str = ""
    """which of them, such as `jsonl`"""
    is_default: bool = False
    """whether a table without `name` is this component"""

    @property
    def header(self) -> str:
        """The table's header in a recipe."""
        return f"[[{self.table}]]" if self.is_list else f"[{self.table}]"

    @property
    def summary(self) -> str:
        """What it is, in one sentence."""
        return summary(self.config)

    def fields(self) -> list[FieldDescription]:
        """Return the keys of the table."""
        fields = describe(self.config)
        flavors = " | ".join(format_value(each) for each in getattr(self.config, "flavors", ()))
        return [
            replace(field, type=flavors) if field.key == "flavor" and flavors else field
            for field in fields
        ]


@cache
def sections() -> tuple[Section, ...]:
    """Return every table of a recipe, each component of a kind by itself."""
    # Components of one kind may hold the same table, which is listed once.
    return tuple(dict.fromkeys(_below("", Recipe)))


def _below(table: str, config: type[BaseModel]) -> Iterator[Section]:
    for key, field in config.model_fields.items():
        for section in _at(f"{table}.{key}".lstrip("."), field):
            yield section
            yield from _below(section.table, section.config)


def _at(table: str, field: FieldInfo) -> Iterator[Section]:
    here = slot(field)
    if here.table:
        yield Section(table, here.table, here.is_list)
    elif here.registry:
        registry: Registry[Any] = here.registry
        for name in registry:
            is_default = name == registry.default
            kind = registry.kind
            yield Section(table, registry[name], here.is_list, kind, name, is_default)


def tables() -> dict[str, type[BaseModel]]:
    """Return the tables in which there is nothing to choose, by dotted name."""
    return {each.table: each.config for each in sections() if not each.kind}


def components(word: str) -> list[Section]:
    """Return the components of a kind, or of the table that takes them."""
    return [each for each in sections() if each.component and word in (each.kind, each.table)]


def tables_called(word: str) -> list[Section]:
    """Return the tables and components of this name, such as `data`, `adamw` or `source.hf`."""
    return [each for each in sections() if word in _section_names(each)]


def keys_called(word: str) -> list[Key]:
    """Return the keys of this name, one for each component that has it.

    Args:
        word: such as `optimizer.lr`, `adamw.lr`, `optimizer.adamw.lr` or `data.sources.0.weight`.
    """
    if word == EXTENDS.key:
        return [EXTENDS]
    word = ".".join(part for part in word.split(".") if not part.isdigit())
    owner, _, key = word.rpartition(".")
    # The owner first: to describe the keys of all tables takes long.
    return [
        _key(section, field)
        for section in sections()
        if owner in _owner_names(section)
        for field in section.fields()
        if field.key == key
    ]


def nearest_known(word: str, more: Sequence[str] = ()) -> str:
    """Return what was probably meant by a word that nothing is called by.

    Args:
        word: what was asked for; a key alone gets the tables that have it.
        more: other words that are known.
    """
    known = [EXTENDS.key, *more]
    owners = {}
    for section in sections():
        keys = [field.key for field in section.fields()]
        known += _section_names(section)
        known += [f"{name}.{key}" for name in _owner_names(section) for key in keys]
        if word in keys:
            owners[f'"{section.table}.{word}"'] = True
    if owners:
        return f"did you mean {' or '.join(owners)}?"
    if ours := find_key(*word.split(".")) or find_option(word):
        return f"here it is {ours}"
    return nearest(word, [*known, *REGISTRIES])


def _section_names(section: Section) -> list[str]:
    if not section.component:
        return [section.table]
    name = section.component
    return [name, f"{section.table}.{name}", f"{section.kind}.{name}"]


def _owner_names(section: Section) -> list[str]:
    if not section.component:
        return [section.table]
    return [section.table, section.kind, *_section_names(section)]


def _key(section: Section, field: FieldDescription) -> Key:
    first = f"{section.table}.0" if section.is_list else section.table
    return Key(
        f"{section.table}.{field.key}",
        section.component,
        field.type,
        field.default,
        field.description or ("which component this is" if field.key == "name" else ""),
        resume_policy(f"{first}.{field.key}"),
        {
            recipe: ", ".join(dict.fromkeys(map(format_value, given)))
            for recipe in shipped_recipes()
            if (given := list(_given(section, field.key, recipe)))
        },
    )


def _given(section: Section, key: str, recipe: str) -> Iterator[Any]:
    """Yield what a shipped recipe writes at a key, in each of its tables of this component."""
    found: list[Any] = [_values(recipe)]
    for part in section.table.split("."):
        inner = [each.get(part, {}) for each in found]
        found = [item for each in inner for item in (each if isinstance(each, list) else [each])]
    for table in found:
        default = section.component if section.is_default else None
        if section.component and table.get("name", default) != section.component:
            continue
        if key in table and not is_table(table[key]):
            yield table[key]


@cache
def _values(recipe: str) -> dict[str, Any]:
    return read_layers(RECIPES / f"{recipe}.toml").values
