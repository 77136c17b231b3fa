"""A text with the parts of it that are trained on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MarkedText:
    """A document of which only some parts are learned from, such as the assistant's turns.

    Args:
        text: the whole document.
        learned: `[start, stop)` ranges of its characters, ascending, that count in the loss.
    """

    text: str
    learned: tuple[tuple[int, int], ...]
