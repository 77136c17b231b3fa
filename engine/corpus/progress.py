"""How far tokenising has come: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenise import Tokenised

NOTE_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass
class TokenisingProgress:
    """How far a preparation has come.

    Attributes:
        parts: how many there are.
        parts_done: how many are in the result.
        parts_found: how many of these were there already, from an interrupted call.
        documents: in the result.
        tokens: in the result.
        new_tokens: of these, what this call made.
        new_bytes: of text, from which it did.
        started: when.
    """

    parts: int
    parts_done: int = 0
    parts_found: int = 0
    documents: int = 0
    tokens: int = 0
    new_tokens: int = 0
    new_bytes: int = 0
    started: float = field(default_factory=time.monotonic)

    def count(self, piece: Tokenised) -> None:
        """Take note of what this call made."""
        self.new_bytes += piece.tally.text_bytes
        self.new_tokens += len(piece.chunk.tokens) if piece.chunk else 0

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """What remains, if parts go on as they did; None: nothing is known."""
        made = self.parts_done - self.parts_found
        return self.seconds / made * (self.parts - self.parts_done) if made else None


Watch = Callable[[TokenisingProgress], None]


def log_now_and_then(name: str) -> Watch:
    """Return a watch that writes a line to the log every ten seconds."""
    return _now_and_then(lambda text: log.info("tokenising %s: %s", name, text))


@contextmanager
def shown_progress() -> Iterator[Watch]:
    """Give a watch that draws a bar if stderr is a terminal, and else prints lines there."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _now_and_then(lambda text: print(text, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), TextColumn("{task.description}"))
    # Redrawn when there is news: no thread, for processes are forked meanwhile.
    with Bars(*columns, console=Console(stderr=True), auto_refresh=False) as bars:
        bar = bars.add_task("reading", total=None)

        def watch(progress: TokenisingProgress) -> None:
            total = progress.parts if progress.parts > 1 else None
            bars.update(
                bar, total=total, completed=progress.parts_done, description=describe(progress)
            )
            bars.refresh()

        yield watch


def describe(progress: TokenisingProgress) -> str:
    """Return documents, speeds and the time left, in a line."""
    seconds = max(progress.seconds, 1e-3)
    cells = [
        f"{progress.documents:,} documents",
        f"{progress.tokens / 1e6:,.1f} M tokens",
        f"{progress.new_bytes / seconds / 1e6:.1f} MB/s",
        f"{progress.new_tokens / seconds / 1e6:.2f} M tokens/s",
    ]
    if progress.seconds_left is not None:
        minutes, second = divmod(round(progress.seconds_left), 60)
        cells.append(f"eta {minutes // 60}:{minutes % 60:02}:{second:02}")
    return " · ".join(cells)


def _now_and_then(show: Callable[[str], None]) -> Watch:
    noted = time.monotonic()

    def watch(progress: TokenisingProgress) -> None:
        nonlocal noted
        if time.monotonic() - noted > NOTE_SECONDS:
            noted = time.monotonic()
            show(describe(progress))

    return watch
