"""Text of others, made safe to print. Torch-free."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape what a terminal would act upon or could not show, line ends included."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Do the same to each line of a text."""
    return "\n".join(map(printable, text.split("\n")))
