"""A stream's windows: runs of documents, tokenised one after the other beside training.

Where a window begins and ends depends on the source and the window's number alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ..core.errors import DataError, EnvironmentFault, TrainerError
from ..core.files import publish, read_regular
from ..core.processes import die_with_parent
from ..corpus.manifest import find_damaged_files, read_manifest
from ..corpus.store import StoreWriter, TokenStore
from ..corpus.tokenise import tokenise
from ..sources.configs import DocumentSource
from ..sources.documents import Document, DocumentFault, text_of
from ..tokenizers.tokenizer import Tokenizer

# Characters of text. The first windows are small, so that training starts at once; rows are
# shuffled within a window, so that larger ones mix better.
FIRST_WINDOW, LARGEST_WINDOW = 2**20, 2**24
ROWS_A_WINDOW = 64
MAX_DOCUMENTS = 2**17
PLACE = "place.json"


class Cursor(NamedTuple):
    """A position in a source, between two documents."""

    turn: int = 0
    """completed passes over the source"""
    part: int = 0
    """index among the source's `parts`"""
    document: int = 0
    """index within the part, counting documents that could not be read"""


class Start(NamedTuple):
    """The first window to prepare, and where it begins in the source."""

    window: int = 0
    place: Cursor = Cursor()


class PrefetchRange(NamedTuple):
    """The windows that training needs now."""

    oldest: int
    """windows before this one can be deleted"""
    newest: int
    """windows up to and including this one should be tokenised soon"""


@dataclass(frozen=True)
class Window:
    """A window on disk.

    Attributes:
        start: before its first document.
        end: before the first document of the next window.
        store: its tokens.
    """

    start: Cursor
    end: Cursor
    store: TokenStore


def window_size(number: int, seq_len: int) -> int:
    """Return how many characters a window has at least."""
    grown = FIRST_WINDOW << min(number, 30)
    return max(min(grown, LARGEST_WINDOW), ROWS_A_WINDOW * seq_len)


class Reader:
    """Reads a source window by window, turn after turn, from a place on."""

    def __init__(self, source: DocumentSource, place: Cursor) -> None:
        self.source = source
        self.place = place
        self.parts = source.parts()
        self._documents: Iterator[Document] | None = None

    def window(self, size: int) -> Iterator[Document]:
        """Yield the next documents, `size` characters or a little more; a turn ends a window."""
        characters = documents = 0
        while characters < size and documents < MAX_DOCUMENTS:
            turn, part, number = self.place
            if part >= len(self.parts):
                self.place = Cursor(turn + 1)
                return
            if self._documents is None:
                self._documents = self.source.read_from(self.parts[part], number)
            document = next(self._documents, None)
            if document is None:
                self.place = Cursor(turn, part + 1)
                self._documents = None
                continue
            self.place = Cursor(turn, part, number + 1)
            documents += 1
            if not isinstance(document, DocumentFault):
                characters += len(text_of(document))
            yield document


def window_folder(folder: Path, number: int) -> Path:
    """Return where a window is."""
    return folder / f"{number:08d}"


def open_window(folder: Path, number: int, tokenizer: Tokenizer) -> Window | None:
    """Return a window; None: it is not there, or not whole."""
    place = window_folder(folder, number)
    with suppress(TrainerError, OSError, ValueError, TypeError, KeyError):
        manifest = read_manifest(place)
        if not any(find_damaged_files(place, manifest)):
            ends = json.loads(read_regular(place / PLACE))
            store = TokenStore.open(place, tokenizer)
            return Window(Cursor(*ends["start"]), Cursor(*ends["end"]), store)
    return None


@dataclass
class Producer:
    """Writes the windows that training is about to need, and removes those behind it.

    Args:
        source: what to read.
        tokenizer: makes the tokens.
        folder: where windows are.
        seq_len: tokens a row.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    folder: Path
    seq_len: int

    def serve(self, training: Connection, parent: int) -> None:
        """Run the process: receive a `Start`, then `PrefetchRange`s, and send back any error."""
        die_with_parent(parent)
        try:
            self._serve(training)
        except EOFError:
            pass
        except TrainerError as error:
            training.send((type(error), error.message, error.hint))
        except OSError as error:
            what = f"cannot write tokens to {self.folder}: {error.strerror or error}"
            hint = "set data.cache_dir to a folder that is writable and has room"
            training.send((EnvironmentFault, what, hint))
        except Exception as error:  # whatever it is, it must reach the training process
            training.send((DataError, f"{self.source.name}: {type(error).__name__}: {error}", ""))
        os._exit(0)

    def _serve(self, training: Connection) -> None:
        start: Start = training.recv()
        need: PrefetchRange = training.recv()
        number = start.window
        self._remove_all_but(number, need)
        reader = Reader(self.source, start.place)
        while True:
            while training.poll() or number > need.newest:
                need = training.recv()
                self._remove_all_but(number, need)
            found = open_window(self.folder, number, self.tokenizer)
            if found is not None and found.start == reader.place:
                reader = Reader(self.source, found.end)
            else:
                self._make(reader, number)
            number += 1

    def _make(self, reader: Reader, number: int) -> None:
        folder = window_folder(self.folder, number)
        unfinished = folder.with_suffix(f".{os.getpid()}")
        start = reader.place
        self._remove(folder)
        with StoreWriter(unfinished, self.tokenizer) as writer:
            while not writer.num_tokens:
                if reader.place.turn > start.turn + 1:
                    skipped = writer.tally.skipped
                    raise DataError(
                        f'the "{self.source.name}" source holds no text ({skipped} skipped)'
                    )
                documents = reader.window(window_size(number, self.seq_len))
                for chunk in tokenise(documents, self.source.on_error, self.tokenizer):
                    writer.write(chunk)
            place = json.dumps({"start": start, "end": reader.place})
            (unfinished / PLACE).write_text(place, encoding="utf-8")
            writer.finish()
        publish(unfinished, folder)

    def _remove_all_but(self, number: int, need: PrefetchRange) -> None:
        """Remove the windows that training has left behind, and what others left unfinished."""
        for folder in self.folder.iterdir():
            if folder.is_dir() and not (
                folder.name.isdecimal() and need.oldest <= int(folder.name) <= need.newest
            ):
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Remove a window; who opens it at this moment finds it whole or not at all."""
        gone = folder.with_name(f"gone.{os.getpid()}")
        with suppress(FileNotFoundError):
            folder.rename(gone)
            shutil.rmtree(gone)
