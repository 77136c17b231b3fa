"""The screen of a run that trains: a progress bar on a terminal, plain lines anywhere else.

When the reader of the output is gone (`| head -1`, a closed terminal), training continues.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from ..core.terminal import ProgressBar, format_clock, ignore_closed, is_terminal
from ..core.text.display import make_lines_printable
from .metrics import TASKS, VALIDATION

MOST_METRICS = 6
"""metrics of an evaluation that its line shows"""
_NOT_SHOWN = {"loss", "perplexity", "bits_per_byte", "time"}


class Progress:
    """The screen of a run, used by rank 0. This one shows nothing."""

    def start(self, step: int, total: int) -> None:
        """Begin after `step` finished steps of `total`."""

    def advance(self, step: int) -> None:
        """Count a finished step; called for each one, so it must be cheap."""

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Print a message above the bar."""

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""

    def close(self) -> None:
        """Remove the bar and show the cursor."""


def open_progress(rank: int, stream: TextIO | None = None) -> Progress:
    """Return a bar if the stream (stdout) is a terminal, lines if not, and silence off rank 0."""
    stream = stream or sys.stdout
    if rank != 0:
        return Progress()
    if is_terminal(stream):
        return LiveProgress(stream)
    return LineProgress(stream)


class LineProgress(Progress):
    """One aligned line a row, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = 0

    def start(self, step: int, total: int) -> None:
        """Print the range of steps."""
        self._total = total
        self._print(f"training from step {step + 1} to {total}")

    def show(self, row: Mapping[str, Any]) -> None:
        """Print the row."""
        width = len(str(self._total))
        word = "step" if row["kind"] == "train" else row["kind"]
        cells = [f"{word} {row['step']:>{width}}/{self._total}", *_format_cells(row, self._total)]
        self._print("  ".join(cells).rstrip())

    def note(self, text: str) -> None:
        """Print the text."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print the text."""
        self._print(f"warning: {text}")

    def _print(self, line: str) -> None:
        with ignore_closed(self._stream):
            self._stream.write(make_lines_printable(line) + "\n")
            # A log that is read while the run trains must not lag behind by a buffer.
            self._stream.flush()


class LiveProgress(Progress):
    """A bar with the newest numbers below it; rows and messages scroll by above."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = ProgressBar(stream)
        self._step = self._total = 0
        self._latest: dict[str, Any] = {}

    def start(self, step: int, total: int) -> None:
        """Draw the bar."""
        self._step, self._total, self._latest = step, total, {}
        self._bar.start()
        self._draw(force=True)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._step = step
        self._draw()

    def show(self, row: Mapping[str, Any]) -> None:
        """Print the row above the bar; the row of a step or a round stands below the bar too."""
        is_step = row["kind"] == "train"
        if is_step or row["kind"] == "round":
            self._step, self._latest = row["step"], dict(row)
        label = f"{'step' if is_step else row['kind']} {row['step']}/{self._total}"
        self._bar.print(f"{label}  {_compact(row)}", "" if is_step else "cyan")
        self._draw()

    def note(self, text: str) -> None:
        """Print the text above the bar."""
        self._bar.print(text)

    def warn(self, text: str) -> None:
        """Print the text above the bar, coloured."""
        self._bar.print(f"warning: {text}", "yellow")

    def close(self) -> None:
        """Draw the bar a last time, and show the cursor."""
        self._draw(force=True)
        self._bar.close()

    def _draw(self, *, force: bool = False) -> None:
        seconds = self._latest.get("step_seconds")
        self._bar.update(
            f"step {self._step}/{self._total}",
            self._step,
            self._total,
            (self._total - self._step) * seconds if seconds else None,
            _compact(self._latest) if self._latest else "waiting for the first step",
            force=force,
        )


def _format_cells(row: Mapping[str, Any], total: int) -> list[str]:
    """Return `name value` for each number of a row that is shown, each with a fixed width."""
    cells = [f"loss {row['loss']:<8.5g}"] if "loss" in row else []
    if row["kind"] == "eval":
        if row.get("split", VALIDATION) != VALIDATION:
            cells.insert(0, row["split"])
        # A number for each class or source is in the files alone; tasks have no others.
        shows_parts = row.get("split") == TASKS
        metrics = [
            key
            for key, value in row.items()
            if isinstance(value, float) and shows_parts >= ("/" in key) and key not in _NOT_SHOWN
        ]
        return cells + [f"{key} {row[key]:<8.4g}" for key in metrics[:MOST_METRICS]]
    if row["kind"] in ("round", "client"):
        return cells + _format_round(row)
    if row["kind"] != "train":
        return cells
    if "grad_norm" in row:
        cells.append(f"grad {row['grad_norm']:<8.4g}")
    if "lr" in row:
        cells.append(f"lr {row['lr']:<9.3e}")
    if "tokens_per_second" in row:
        cells.append(f"tok/s {row['tokens_per_second']:<9,.0f}")
    else:
        cells.append(f"samples/s {row['samples_per_second']:<9,.4g}")
    if row["mfu"] is not None:
        cells.append(f"mfu {row['mfu']:5.1%}")
    cells.append(f"wait {row['data_seconds'] / row['step_seconds']:4.0%}")
    cells.append(f"mem {row['memory_bytes'] / 2**30:.2f} GiB")
    if total:
        cells.append(f"eta {format_clock((total - row['step']) * row['step_seconds'])}")
    return cells


def _format_round(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a round, or of a client's part in it."""
    names = [f"round {row['round']}"]
    if row["kind"] == "client":
        names.append(f"client {row['client']}")
    else:
        names += [f"clients {row['clients']}", f"norm {row['pseudo_gradient_norm']:.4g}"]
    sent, received = (f"{row[f'bytes_{word}'] / 1e6:.3g} MB" for word in ("sent", "received"))
    return [*names, f"sent {sent}, received {received}", f"{row['seconds']:.1f} s"]


def _compact(row: Mapping[str, Any]) -> str:
    """Return the cells without the padding that aligns lines."""
    return " · ".join(" ".join(cell.split()) for cell in _format_cells(row, total=0))


@contextmanager
def forward_logs(progress: Progress) -> Iterator[None]:
    """Show the log messages of this package: information as notes, all else as warnings."""
    logger, handler = logging.getLogger("trainer"), _ProgressHandler(progress)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _ProgressHandler(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        show = self._progress.warn if record.levelno >= logging.WARNING else self._progress.note
        show(record.getMessage())
