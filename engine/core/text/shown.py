"""Keys and values as messages show them: short, and safe for a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any

from .positions import KeyPath
from .printable import printable

LONGEST = 60


def shorten(text: str) -> str:
    """Cut a long text in the middle."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 20]}...{text[-15:]}"


def dotted(path: KeyPath) -> str:
    """Return `data.sources.0.weight`; odd parts are quoted."""
    return ".".join(quoted_part(part) for part in path)


def shown_key(path: KeyPath) -> str:
    """Return the dotted key as a message shows it."""
    return shorten(printable(dotted(path)))


def quoted_part(part: str | int) -> str:
    """Return one part of a key as TOML writes it."""
    text = str(part)
    if re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return text
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
    return "none" if value is None else shorten(str(value))
