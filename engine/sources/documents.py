"""What a source yields."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.text.printable import printable
from ..tokenizers.marked_text import MarkedText


@dataclass(frozen=True)
class DocumentFault:
    """A document that cannot be read, and where it stands; a terminal and JSON can show both.

    Args:
        file: its file, or another name that users know.
        reason: what is wrong.
        line: the line, from 1, counted from byte `start` of the file on; 0: none.
        start: where a line of the file begins.
    """

    file: str
    reason: str
    line: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        """Escape what a file's name, or the words of a document in the reason, may hold."""
        object.__setattr__(self, "file", printable(self.file))
        object.__setattr__(self, "reason", printable(self.reason))

    @property
    def place(self) -> str:
        """Return `file:line`; the lines before `start` are counted now."""
        from .parts import lines_before

        line = self.line and lines_before(self.file, self.start) + self.line
        return f"{self.file}:{line}" if line else self.file

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


Document = str | MarkedText | DocumentFault


def text_of(document: str | MarkedText) -> str:
    """Return the whole text."""
    return document.text if isinstance(document, MarkedText) else document
