"""The product's one progress bar, and output that survives a reader who goes away. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from .text.display import make_lines_printable

REFRESH_SECONDS = 0.2


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can draw a bar."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def format_clock(seconds: float) -> str:
    """Return `h:mm:ss`, with days before it where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


@contextmanager
def ignore_closed(stream: TextIO) -> Iterator[None]:
    """Point a stream whose reader has gone away at the null device, for good."""
    try:
        yield
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            # The descriptor itself: the interpreter flushes the stream once more when it ends.
            os.dup2(null, stream.fileno())
            os.close(null)


class ProgressBar:
    """A bar on a terminal with a line of text below it; messages scroll by above.

    No thread draws it, because processes may be forked meanwhile: `update` draws, at most every
    `REFRESH_SECONDS`.

    Args:
        stream: the terminal.
        transient: True removes the bar when it is closed.
    """

    def __init__(self, stream: TextIO, *, transient: bool = False) -> None:
        # rich takes longer to import than most commands take to run.
        from rich.console import Console
        from rich.live import Live

        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=transient)
        self._drawn_at = 0.0

    def start(self) -> None:
        """Take over the terminal's last lines."""
        with ignore_closed(self._stream):
            self._live.start()

    def update(
        self,
        label: str,
        completed: float,
        total: float | None,
        seconds_left: float | None,
        below: str,
        *,
        force: bool = False,
    ) -> None:
        """Draw the bar, unless it was drawn a moment ago or is closed.

        Args:
            label: the text before the bar.
            completed: how much is done.
            total: how much there is to do; None: unknown.
            seconds_left: the estimated time left; None: unknown.
            below: the line below the bar; what does not fit is cut off.
            force: draw in any case.
        """
        if not self._live.is_started:
            return
        if not force and time.monotonic() - self._drawn_at <= REFRESH_SECONDS:
            return
        self._drawn_at = time.monotonic()
        from rich.console import Group
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        clock = "-:--:--" if seconds_left is None else format_clock(seconds_left)
        end = None if total is None else max(total, 1)
        line.add_row(label, Bar(total=end, completed=completed), f"eta {clock}")
        with ignore_closed(self._stream):
            text = Text(below, no_wrap=True, overflow="ellipsis")
            self._live.update(Group(line, text), refresh=True)

    def print(self, text: str, style: str = "") -> None:
        """Print a message above the bar.

        Args:
            text: the message; control characters are escaped.
            style: a colour of rich, such as "yellow".
        """
        from rich.text import Text

        with ignore_closed(self._stream):
            self._console.print(Text(make_lines_printable(text), style))

    def close(self) -> None:
        """Leave the terminal as a shell expects it."""
        with ignore_closed(self._stream):
            self._live.stop()
