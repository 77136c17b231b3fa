"""Degrees in one text: `parallel.mesh = "dp:2,fsdp:-1,tp:4"`."""

from __future__ import annotations

import re

from ..core.errors import nearest
from ..core.text.display import format_value

WORDS = {
    "replicate": ("dp", "ddp"),
    "shard": ("fsdp",),
    "context": ("cp",),
    "tensor": ("tp",),
    "pipeline": ("pp",),
    "expert": ("ep",),
    "expert_tensor": ("etp",),
}
"""axis -> what else it is called"""
AXES = {word: axis for axis, words in WORDS.items() for word in (axis, *words)}
LARGEST = 2**20


def parse_mesh(text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the degree of every axis, 1 where the text does not name it, and what is wrong.

    Args:
        text: `WORD:DEGREE` and commas.

    Returns:
        degrees by axis; faults, each with a hint.
    """
    degrees: dict[str, int] = {}
    faults = []
    for entry in text.split(","):
        word, _, number = (part.strip() for part in entry.partition(":"))
        axis = AXES.get(word.lower())
        if axis is None:
            faults.append(_unknown(word, text))
        elif axis in degrees:
            faults.append((f"{format_value(entry.strip())} gives {axis} a second time", ""))
        elif not re.fullmatch(r"-1|[0-9]{1,7}", number) or not -1 <= int(number) <= LARGEST:
            message = f"expected a degree of {axis}, such as {word}:2, got {format_value(number)}"
            faults.append((message, "-1 takes what is left over"))
        else:
            degrees[axis] = int(number)
    return {axis: degrees.get(axis, 1) for axis in WORDS}, faults


def _unknown(word: str, text: str) -> tuple[str, str]:
    if not word:
        message = f"expected WORD:DEGREE and commas, got {format_value(text)}"
        return message, 'such as "dp:2,fsdp:-1,tp:4"'
    known = nearest(word.lower(), AXES) or f"known: {', '.join(AXES)}"
    return f"no axis of the mesh is called {format_value(word)}", known
