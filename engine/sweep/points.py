"""Turns `--grid` and `--zip` into the points of a sweep, each with a distinct name. Torch-free."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..core.errors import Problem, RecipeError
from ..core.text.display import format_value, make_printable, shorten

MAX_POINTS = 10_000
LONGEST_NAME = 80
_SPACED = re.compile(r"(log|lin):([^.]\S*?)\.\.(\S+):(\d{1,5})")


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    settings: tuple[str, ...]
    """`key=value` each, as for `--set`"""


@dataclass(frozen=True)
class _Axis:
    option: str
    key: str
    values: tuple[str, ...]


def make_points(grids: Sequence[str], zips: Sequence[str]) -> list[Point]:
    """Return the Cartesian product of the grids and of the zip.

    All `--zip` keys change together and count as one factor of the product.

    Args:
        grids: the `--grid` options, `key=a,b,c` or `key=log:1e-4..1e-2:5` (`lin:` for equal steps).
        zips: the `--zip` options in the same form, all with equally many values.

    Raises:
        RecipeError: options are invalid. All problems are listed.
    """
    problems: list[Problem] = []
    axes: list[_Axis] = []
    for option, texts in (("--grid", grids), ("--zip", zips)):
        for text in texts:
            try:
                axes.append(_axis(option, text))
            except ValueError as error:
                problems.append(Problem(str(error), shorten(make_printable(text)), option))
    problems += _contradictions(axes)
    groups = [[axis] for axis in axes if axis.option == "--grid"]
    groups += [zipped] if (zipped := [axis for axis in axes if axis.option == "--zip"]) else []
    if not groups and not problems:
        problems.append(Problem("nothing to vary", hint="such as --grid optimizer.lr=1e-4,3e-4"))
    elif (count := prod(len(group[0].values) for group in groups)) > MAX_POINTS:
        problems.append(Problem(f"{count:,} points are more than {MAX_POINTS:,}", "", "--grid"))
    if problems:
        raise RecipeError(problems)
    choices = [
        [[f"{axis.key}={axis.values[index]}" for axis in group]
         for index in range(len(group[0].values))]
        for group in groups
    ]  # fmt: skip
    words = _short_keys([axis.key for group in groups for axis in group])
    chosen = [tuple(itertools.chain(*each)) for each in itertools.product(*choices)]
    return [Point(name, each) for name, each in zip(_names(chosen, words), chosen, strict=True)]


def split_values(text: str) -> list[str]:
    """Split a text at the commas that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _axis(option: str, text: str) -> _Axis:
    key, equals, values = (part.strip() for part in text.partition("="))
    if not key or not equals or not values:
        raise ValueError("expected KEY=VALUE,VALUE,..., such as optimizer.lr=1e-4,3e-4")
    if key in ("run.name", "run.dir", "run.experiment", "run.lineage"):
        raise ValueError("a sweep names its runs itself; give --dir for its folder")
    texts = _spaced(values) if values.startswith(("log:", "lin:")) else split_values(values)
    if not all(texts):
        raise ValueError("a value is missing between two commas")
    twice = [value for value in dict.fromkeys(texts) if texts.count(value) > 1]
    if twice:
        raise ValueError(f"{format_value(twice[0])} is there twice")
    return _Axis(option, key, tuple(texts))


def _spaced(text: str) -> list[str]:
    """Return the values of `log:LOW..HIGH:COUNT` or `lin:LOW..HIGH:COUNT`."""
    match = _SPACED.fullmatch(text)
    try:
        kind, low, high, count = match[1], float(match[2]), float(match[3]), int(match[4])  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError("expected log:LOW..HIGH:COUNT, such as log:1e-4..1e-2:5") from None
    if not 2 <= count <= MAX_POINTS or not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("expected two numbers and at least 2 values between them")
    if kind == "log" and not (low > 0 and high > 0):
        raise ValueError("a logarithmic range has positive ends")
    shares = [index / (count - 1) for index in range(count)]
    if kind == "log":
        values = [low * (high / low) ** share for share in shares]
    else:
        values = [low + (high - low) * share for share in shares]
    whole = "." not in match[2] + match[3] and kind == "lin" and all(v == int(v) for v in values)  # type: ignore[index]
    return [str(int(value)) if whole else repr(float(f"{value:.4g}")) for value in values]


def _contradictions(axes: Sequence[_Axis]) -> Iterator[Problem]:
    keys = [axis.key for axis in axes]
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            yield Problem("this key is varied twice", shorten(make_printable(key)), "--grid")
    lengths = {axis.key: len(axis.values) for axis in axes if axis.option == "--zip"}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{make_printable(key)} has {count}" for key, count in lengths.items())
        yield Problem(f"zipped keys need equally many values: {counts}", "", "--zip")


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest suffix of each dotted key that no other key has."""
    words = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        words[key] = next(
            ending
            for ending in endings
            if ending == key or sum(f".{other}".endswith(f".{ending}") for other in keys) == 1
        )
    return words


def _names(chosen: Sequence[tuple[str, ...]], words: dict[str, str]) -> list[str]:
    """Return a folder name for each point, made of the point's settings.

    A name that is too long or not unique is shortened and gets a hash of the settings.
    """
    names = []
    for settings in chosen:
        pairs = [setting.partition("=")[::2] for setting in settings]
        text = "_".join(f"{words[key]}-{value.strip(chr(34) + chr(39))}" for key, value in pairs)
        names.append(re.sub(r"[^\w.-]+", "-", text).strip(".-"))
    return [
        name
        if len(name) <= LONGEST_NAME and names.count(name) == 1 and re.match(r"\w", name)
        else f"p{name[: LONGEST_NAME - 20]}-{_digest(settings)}"
        for name, settings in zip(names, chosen, strict=True)
    ]


def _digest(settings: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
