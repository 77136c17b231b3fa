"""What a shell completes: keys of recipes and their values, kinds, components, words and GPUs.

A shell runs the command each time that Tab is pressed. Modules that commands of other kinds do not
need are imported by the function that asks for them, as in the commands themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import typer


def complete_override(incomplete: str) -> list[str]:
    """Return the keys that start with a text, with `=`; after the `=`, values that are words."""
    from ..engine.recipe.documents.reference import components, sections

    key, equals, value = incomplete.partition("=")
    if not equals:
        tables = [section for section in sections() if not section.is_list]
        # Entries of lists have numbers, which the shell cannot know: 0 is the first.
        first = [(each.table, each) for each in tables]
        first += [(f"{each.table}.0", each) for each in sections() if each.is_list]
        keys = [f"{table}.{field}=" for table, each in first for field in each.config.model_fields]
        return sorted({each for each in keys if each.startswith(key)})
    table, _, name = ".".join(part for part in key.split(".") if not part.isdigit()).rpartition(".")
    words = [each.component for each in components(table)] if name == "name" else []
    for section in sections():
        if section.table == table:
            types = [field.type for field in section.fields() if field.key == name]
            words += [word for each in types for word in _words(each)]
    return [f"{key}={word}" for word in dict.fromkeys(words) if word.startswith(value)]


def _words(type_text: str) -> list[str]:
    """Return the values of a type that has few, such as `"sync" | "async"`."""
    if type_text == "true or false":
        return ["true", "false"]
    return [each.strip('"') for each in type_text.split(" | ") if each.startswith('"')]


def complete_kind(incomplete: str) -> list[str]:
    """Return the kinds of components that start with a text."""
    from ..engine.recipe.schema import REGISTRIES

    return [kind for kind in (*REGISTRIES, "table", "recipe") if kind.startswith(incomplete)]


def complete_component(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the components of the given kind that start with a text."""
    from ..engine.recipe.documents.reference import tables
    from ..engine.recipe.documents.starter import shipped_recipes
    from ..engine.recipe.schema import REGISTRIES

    names: dict[str, Iterable[str]] = {**REGISTRIES}
    names |= {"table": tables(), "recipe": shipped_recipes()}
    known = names.get(str(ctx.params.get("kind")), ())
    return [name for name in known if name.startswith(incomplete)]


def complete_word(incomplete: str) -> list[str]:
    """Return the words of `trainer docs` that start with a text."""
    from ..engine.recipe.documents.reference import sections
    from ..engine.recipe.documents.starter import shipped_recipes
    from .main import COMMANDS

    words = {*shipped_recipes(), *COMMANDS, "exit-codes"}
    for section in sections():
        words |= {section.table, section.component, section.kind}
        words |= {f"{section.table}.{key}" for key in section.config.model_fields}
    return sorted(word for word in words if word and word.startswith(incomplete))


def complete_gpu(incomplete: str) -> list[str]:
    """Return the GPUs whose names start with a text."""
    from ..engine.estimate.devices import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete)]
