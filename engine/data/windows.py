"""A stream's windows: runs of documents, tokenised one after the other beside training.

Where a window begins and ends depends on the source and the window's number alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..core.errors import TrainerError
from ..core.files import read_regular
from ..corpus.manifest import find_damaged_files, read_manifest
from ..corpus.store import TokenStore
from ..sources.configs import DocumentSource
from ..sources.documents import Document, DocumentFault, text_of
from ..tokenizers.tokenizer import Tokenizer

# Characters of text. The first windows are small, so that training starts at once; rows are
# shuffled within a window, so that larger ones mix better.
FIRST_WINDOW, LARGEST_WINDOW = 2**20, 2**24
ROWS_A_WINDOW = 64
MAX_DOCUMENTS = 2**17
CURSORS = "place.json"


class Cursor(NamedTuple):
    """A position in a source, between two documents."""

    epoch: int = 0
    """completed passes over the source"""
    part: int = 0
    """index among the source's `parts`"""
    document: int = 0
    """index within the part, counting documents that could not be read"""


class WindowStart(NamedTuple):
    """Where a window begins."""

    number: int = 0
    """the number of the window"""
    row: int = 0
    """the stream's rows before it"""
    cursor: Cursor = Cursor()
    """the position of its first document"""
    tokens: str = ""
    """the fingerprint of its tokens, if known"""


class PrefetchRange(NamedTuple):
    """The windows that training needs now."""

    oldest: int
    """windows before this one can be deleted"""
    newest: int
    """windows up to and including this one should be tokenised soon"""


class Window(NamedTuple):
    """A window on disk."""

    start: Cursor
    """the position of its first document"""
    end: Cursor
    """the position of the next window's first document"""
    store: TokenStore


class WindowReader:
    """Reads a source window by window, epoch after epoch, from a cursor on."""

    def __init__(self, source: DocumentSource, cursor: Cursor) -> None:
        self.source = source
        self.cursor = cursor
        self.parts = source.parts()
        self._documents: Iterator[Document] | None = None

    def read(self, size: int) -> Iterator[Document]:
        """Yield the next documents, `size` characters or a little more; an epoch ends a window."""
        characters = documents = 0
        while characters < size and documents < MAX_DOCUMENTS:
            epoch, part, number = self.cursor
            if part >= len(self.parts):
                self.cursor = Cursor(epoch + 1)
                return
            if self._documents is None:
                self._documents = self.source.read_from(self.parts[part], number)
            document = next(self._documents, None)
            if document is None:
                self.cursor = Cursor(epoch, part + 1)
                self._documents = None
                continue
            # Set before the yield: a document counts as read as soon as the consumer has it.
            self.cursor = Cursor(epoch, part, number + 1)
            documents += 1
            if not isinstance(document, DocumentFault):
                characters += len(text_of(document))
            yield document


def window_size(number: int, seq_len: int) -> int:
    """Return how many characters a window has at least."""
    # Numbers grow without end, and so would the shifted integer.
    grown = FIRST_WINDOW << min(number, 30)
    return max(min(grown, LARGEST_WINDOW), ROWS_A_WINDOW * seq_len)


def window_folder(folder: Path, number: int) -> Path:
    """Return the path of a window."""
    return folder / f"{number:08d}"


def open_window(folder: Path, number: int, tokenizer: Tokenizer) -> Window | None:
    """Return a window; None if it is missing or damaged."""
    path = window_folder(folder, number)
    # However a window is damaged, the producer can write the same one again.
    with suppress(TrainerError, OSError, ValueError, TypeError, KeyError):
        if not any(find_damaged_files(path, read_manifest(path))):
            ends = json.loads(read_regular(path / CURSORS))
            store = TokenStore.open(path, tokenizer)
            return Window(Cursor(*ends["start"]), Cursor(*ends["end"]), store)
    return None
