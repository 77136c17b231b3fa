"""Reads JSON of unknown origin. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..core.files import open_regular
from ..core.text.display import quote_name


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: the JSON file.
        max_bytes: a larger file is refused, so that a hostile one cannot fill the memory.

    Raises:
        CheckpointError: the file is too large or damaged, or holds something else than an object.
    """
    try:
        with open_regular(path) as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > max_bytes:
        raise CheckpointError(f"{path} has more than {max_bytes} bytes: not read")
    return parse_json(text, path)


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Return a JSON object without keys that are given twice or numbers that JSON does not have.

    Raises:
        CheckpointError: the text is something else.
    """
    try:
        values = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_not_a_number
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", "download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: a JSON object was expected")
    return values


def _not_a_number(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{quote_name(key)} is given twice")
        values[key] = value
    return values
