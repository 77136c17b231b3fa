"""Keys and values as messages show them: short, and safe for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, time
from typing import Any

from .positions import KeyPath

LONGEST = 60


def printable(text: str) -> str:
    """Escape what a terminal would act upon or could not show."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shorten(text: str) -> str:
    """Cut a long text in the middle."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 20]}...{text[-15:]}"


def shown_key(path: KeyPath) -> str:
    """Return `data.sources.0.weight`; odd parts are quoted."""
    return shorten(".".join(_shown_part(part) for part in path))


def _shown_part(part: str | int) -> str:
    text = str(part)
    if text.replace("_", "a").replace("-", "a").isalnum():
        return text
    return f'"{printable(text)}"'


def shown_value(value: Any) -> str:
    """Return a value roughly as TOML writes it."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return shorten(f"[{', '.join(shown_value(item) for item in value[:20])}]")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return shorten(printable(json.dumps(value[:1000], ensure_ascii=False)))
    if isinstance(value, date | time):
        return value.isoformat()
    return "nothing" if value is None else shorten(str(value))
