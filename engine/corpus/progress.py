"""Shows the progress of tokenising: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.terminal import ProgressBar, format_clock, is_terminal

if TYPE_CHECKING:
    from .tokenise import Chunk

NOTE_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass
class TokenisingProgress:
    """The progress of a preparation.

    Attributes:
        parts: the number of parts.
        parts_done: the number of parts in the result.
        parts_found: the number of these that an interrupted call had made.
        documents: the number of documents in the result.
        tokens: the number of tokens in the result.
        new_tokens: the number of these that this call made.
        new_bytes: the bytes of text that this call tokenised.
        started: the time of the start, by the monotonic clock.
    """

    parts: int
    parts_done: int = 0
    parts_found: int = 0
    documents: int = 0
    tokens: int = 0
    new_tokens: int = 0
    new_bytes: int = 0
    started: float = field(default_factory=time.monotonic)

    def count(self, chunk: Chunk) -> None:
        """Add the text bytes and tokens of documents that this call tokenised."""
        self.new_bytes += chunk.tally.text_bytes
        self.new_tokens += len(chunk.tokens)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left, from the mean time of a part; None if no part is done yet."""
        made = self.parts_done - self.parts_found
        return self.seconds / made * (self.parts - self.parts_done) if made else None


Watch = Callable[[TokenisingProgress], None]


def log_every_ten_seconds(name: str) -> Watch:
    """Return a watch that logs a line at most every ten seconds.

    Args:
        name: the name of the source in the log.
    """
    return _every_ten_seconds(lambda text: log.info("tokenising %s: %s", name, text))


@contextmanager
def show_progress() -> Iterator[Watch]:
    """Provide a watch that draws a bar if stderr is a terminal, and else prints lines there."""
    if not is_terminal(sys.stderr):
        yield _every_ten_seconds(lambda text: print(text, file=sys.stderr, flush=True))
        return
    with closing(ProgressBar(sys.stderr)) as bar:
        bar.start()
        yield lambda progress: bar.update(
            f"part {progress.parts_done}/{progress.parts}",
            progress.parts_done,
            progress.parts if progress.parts > 1 else None,
            progress.seconds_left,
            _describe_speed(progress),
            force=progress.parts_done == progress.parts,
        )


def describe(progress: TokenisingProgress) -> str:
    """Return one line with the counts, the speeds and the estimated time left."""
    left = progress.seconds_left
    eta = "" if left is None else f" · eta {format_clock(left)}"
    return _describe_speed(progress) + eta


def _describe_speed(progress: TokenisingProgress) -> str:
    seconds = max(progress.seconds, 1e-3)
    return (
        f"{progress.documents:,} documents · {progress.tokens / 1e6:,.1f} M tokens · "
        f"{progress.new_bytes / seconds / 1e6:.1f} MB/s · "
        f"{progress.new_tokens / seconds / 1e6:.2f} M tokens/s"
    )


def _every_ten_seconds(show: Callable[[str], None]) -> Watch:
    shown_at = time.monotonic()

    def watch(progress: TokenisingProgress) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at > NOTE_SECONDS:
            shown_at = time.monotonic()
            show(describe(progress))

    return watch
