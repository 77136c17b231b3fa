"""Pydantic's errors in our words: what was expected, what was given, the nearest spelling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from ..core.errors import Problem, nearest
from ..core.text.display import format_value, list_words, make_printable
from ..core.text.positions import KeyPath
from ..core.text.tree import Tree
from .checks.replaced_words import replacement, unavailable
from .other_names import find_component, find_key, find_keys
from .structure import GivenTable, describe_fields, every_table, table_at

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "table_type": "a table",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}
MOST = 100
MOST_OWNERS = 3
MOST_KNOWN = 16
_COUNTED = ("too_short", "too_long")


def problems_of(error: ValidationError, tree: Tree) -> list[Problem]:
    """Return every error at its place in the recipe."""
    errors = error.errors(include_url=False)
    problems = [_Fault(each, tree).problem() for each in errors[:MOST]]
    # In the order of the files, not in that of the schema.
    problems.sort(key=lambda problem: (problem.file, problem.line, problem.column))
    if len(errors) > MOST:
        problems.append(Problem(f"and {len(errors) - MOST} more problems"))
    return problems


class _Fault:
    """One error of pydantic over the tree that caused it."""

    def __init__(self, error: Mapping[str, Any], tree: Tree) -> None:
        self.type: str = error["type"]
        self.text: str = error["msg"]
        self.context: Mapping[str, Any] = error.get("ctx", {})
        self.input = error["input"]
        self.tree = tree
        self.location: KeyPath = error["loc"]
        self.path = _existing(self.location, tree.values)

    def problem(self) -> Problem:
        """Return the problem in our words."""
        if self.type == "missing":
            return self.missing()
        if self.type == "extra_forbidden":
            return self.unknown_key()
        if self.type in ("unknown_component", "unknown_flavor", "broken_component"):
            return self.unknown_word("flavor" if self.type == "unknown_flavor" else "name")
        if self.type == "unsupported_component":
            return self.unsupported()
        if self.type in _EXPECTED:
            return self.unexpected()
        return self.refused()

    def missing(self) -> Problem:
        key = self.location[-1]
        table = table_at(self.tree.values, self.path)
        text = describe_fields(table.config).get(str(key), "") if table else ""
        described = f": {_one_line(text)}" if text else ""
        return self.tree.problem((*self.path, key), f"is missing{described}")

    def unknown_key(self) -> Problem:
        key = str(self.path[-1])
        hint = replacement(self.path, self.input) or self.advice(key, self.path[:-1])
        return self.tree.problem(self.path, f"unknown key {format_value(key)}", hint)

    def advice(self, key: str, path: KeyPath) -> str:
        """Return where a key that the table at `path` lacks belongs, or its nearest spelling."""
        table = table_at(self.tree.values, path)
        if not table:
            return ""
        if table.registry and (siblings := table.registry.owners(key)):
            return f"only {list_words(siblings)} of the {table.registry.kind}s have it"
        elsewhere = [
            _bracketed(each)
            for each in every_table(self.tree.values)
            if key in each.config.model_fields and each.path not in ((), path)
        ]
        owners = dict.fromkeys(elsewhere)
        if 0 < len(owners) <= MOST_OWNERS:
            return f"it belongs to {' or '.join(owners)}"
        if ours := self.other_name(key, path):
            return ours
        fields = list(table.config.model_fields)
        return nearest(key, fields) or f"known: {', '.join(fields)}"

    def other_name(self, key: str, path: KeyPath) -> str:
        """Return what to write for a key, or a table of keys, of another trainer."""
        if isinstance(self.input, dict) and (found := find_keys(key, self.input)):
            return found
        found = find_key(*(part for part in path if isinstance(part, str)), key)
        return f"write {found}" if found else ""

    def unknown_word(self, key: str) -> Problem:
        known = str(self.context.get("known", "")).split(", ")
        word = str(self.context.get(key))
        ours = find_component(str(self.context.get("kind")), word)
        hint = f"write {ours}" if ours else nearest(word, known)
        text = _one_line(self.text)
        if len(known) > MOST_KNOWN:
            text = text.partition("; known: ")[0]
            listed = f"`trainer list {self.context.get('kind')}` names all {len(known)}"
            near = [] if ours else get_close_matches(word, known, n=3, cutoff=0.5)
            others = ", ".join(each for each in near if f'"{each}"' not in hint)
            hint += f" also near: {others};" if hint and others else ";" * bool(ours)
            hint = f"{hint} {listed}".strip()
        return self.tree.problem((*self.path, key), text, hint)

    def unsupported(self) -> Problem:
        """Return why a component that is known elsewhere is none of ours."""
        tables = every_table(self.tree.values)
        config = next((each.config for each in tables if each.path == ("task",)), None)
        task = get_args(config.model_fields["name"].annotation)[0] if config else "?"
        message = self.text.replace("{task}", task)
        kind = self.context["kind"]
        hint = f"`trainer list {kind}` names all"
        return self.tree.problem((*self.path, "name"), f"the {message}", hint)

    def unexpected(self) -> Problem:
        if message := unavailable(self.path, self.input):
            return self.tree.problem(self.path, message)
        bounds = {key: _whole(value) for key, value in self.context.items()}
        expected = _EXPECTED[self.type].format_map(bounds).replace("'", '"')
        is_counted = self.type in _COUNTED
        given = f"one of {len(self.input)}" if is_counted else format_value(self.input)
        hint = replacement(self.path, self.input) or self.spelling(expected)
        return self.tree.problem(self.path, f"expected {expected}, got {given}", hint)

    def spelling(self, expected: str) -> str:
        """Return what was probably meant by a value of the wrong type."""
        if not isinstance(self.input, str):
            return ""
        if self.type == "bool_type":
            word = self.input.lower()
            return f"write {word}, without quotes" if word in ("true", "false") else ""
        if self.type in ("int_type", "float_type"):
            is_number = re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", self.input)
            return "remove the quotes" if is_number else ""
        if self.type == "table_type":
            return f"write {{ name = {format_value(self.input)} }}"
        return nearest(self.input, re.findall(r'"([^"]+)"', expected))

    def refused(self) -> Problem:
        """Return what a config's own validator says, at the first key that its message names."""
        text = _one_line(self.text.removeprefix("Value error, ").removeprefix("Assertion failed, "))
        value = self.tree.at(self.path)
        words = re.findall(r"\w+", text)
        named = [word for word in words if isinstance(value, dict) and word in value]
        return self.tree.problem((*self.path, *named[:1]), text)


def _existing(location: tuple[str | int, ...], values: dict[str, Any]) -> KeyPath:
    """Return the location without the marks that pydantic adds for unions and the like."""
    path: KeyPath = ()
    value: Any = values
    for part in location:
        known = isinstance(value, dict) and part in value
        listed = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if known or listed:
            value = value[part]
            path = (*path, part)
    return path


def _whole(value: object) -> object:
    """Return a bound as a reader writes it: pydantic gives those of numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bracketed(table: GivenTable) -> str:
    name = ".".join(part for part in table.path if isinstance(part, str))
    return f"[[{name}]]" if isinstance(table.path[-1], int) else f"[{name}]"


def _one_line(text: str) -> str:
    return make_printable(" ".join(text.split()))
