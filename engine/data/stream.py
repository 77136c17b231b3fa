"""Rows of a source that is tokenised while it is trained on."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, TrainerError
from ..core.hashing import GOLDEN, Words, mix
from ..corpus.store import TokenStore
from ..sources.configs import DocumentSource
from ..tokenizers.tokenizer import Tokenizer
from .order import ENDLESS, Indices, permute
from .packing import PACKINGS, Packed, PackedRows
from .tables import Data
from .windows import Cursor, PrefetchRange, Producer, Start, Window, open_window
from .workers import Child, start_child

# Windows that are made before they are needed, and kept after.
AHEAD, BEHIND = 2, 2
MAX_DEATHS = 2
POLL_SECONDS = 0.02
LOCK_SECONDS = 1.0
ABANDONED_SECONDS = 7 * 24 * 3600

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenWindow:
    """A window cut into rows.

    Attributes:
        number: of the window.
        first_row: the stream's rows before it.
        packed: its own rows.
    """

    number: int
    first_row: int
    start: Cursor
    end: Cursor
    packed: Packed

    @property
    def end_row(self) -> int:
        """The stream's rows up to its end."""
        return self.first_row + self.packed.num_rows


class Next(NamedTuple):
    """The window that comes next.

    Attributes:
        number: of the window.
        row: the stream's rows before it.
        place: where its first document is.
        tokens: their fingerprint, if known.
    """

    number: int = 0
    row: int = 0
    place: Cursor = Cursor()
    tokens: str = ""


class Stream:
    """A source's rows, numbered from 0 without end, read in about this order.

    Row `n` depends on the source, the packing and the key alone; going back means reading from the
    start. Of the processes of a machine that read the same stream for a run, one has a
    child that tokenises; all map what that child writes.

    Args:
        name: what to call it in messages.
        producer: makes the windows, in a folder of this run and this machine.
        table: the `[data]` table.
        key: of the shuffle.
    """

    num_rows = ENDLESS

    def __init__(self, name: str, producer: Producer, table: Data, key: int) -> None:
        self.name = name
        self.producer = producer
        self.table = table
        self.key = np.array([key], dtype=np.uint64)
        self.child: Child | None = None
        self.failure: TrainerError | None = None
        self.windows: list[OpenWindow] = []
        self.next = Next()
        self.fingerprint = producer.source.content_fingerprint()

    @property
    def store(self) -> TokenStore:
        """The newest window's tokens."""
        return self.windows[-1].packed.store

    def start_producer(self) -> None:
        """Start the process that tokenises, unless another process of this machine has one."""
        self.child = self.child or start_child(self.producer)

    def state(self, row: int) -> dict[str, Any]:
        """Return what a run on any machine needs to go on at a row that was reached."""
        at = self.next
        for window in self.windows:
            if window.first_row <= row:
                tokens = window.packed.store.fingerprint
                at = Next(window.number, window.first_row, window.start, tokens)
        return {
            "window": at.number,
            "row": at.row,
            "place": list(at.place),
            "tokens": at.tokens,
            "source": self.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; what has been read already is left as it is."""
        if not self.windows:
            known = state["tokens"] if state["source"] == self.fingerprint else ""
            self.next = Next(state["window"], state["row"], Cursor(*state["place"]), known)

    def ensure(self, first: int, stop: int) -> None:
        """Make rows `first` to `stop - 1` ready; those before `first` are not needed any more.

        Raises:
            DataError: a document cannot be read, or the source is not what it was.
        """
        if first < (self.windows[0].first_row if self.windows else self.next.row):
            # Back to what has been passed, or the mixture is not the one that was saved.
            self.windows, self.next, self.child = [], Next(), None
        oldest = self.windows[0].number if self.windows else self.next.number
        while not self.windows or self.windows[-1].end_row < stop:
            # Ranks reach the same rows, if not at the same moment: none must find a window gone.
            self._open_next(PrefetchRange(max(oldest - BEHIND, 0), self.next.number + AHEAD))
            self._forget(first)
        self._forget(first)

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B], ascending, which have been reached."""
        starts = [window.first_row for window in self.windows]
        which = np.searchsorted(starts, rows, side="right") - 1
        if which[0] == which[-1]:
            return self._gather(self.windows[which[0]], rows)
        return PackedRows.concatenate(
            self._gather(self.windows[index], rows[which == index]) for index in np.unique(which)
        )

    def _gather(self, window: OpenWindow, rows: Indices) -> PackedRows:
        row = rows - window.first_row
        if self.table.shuffle:
            key: Words = mix(self.key + np.array([window.number], np.uint64) * GOLDEN)
            row = permute(
                row.astype(np.uint64), window.packed.num_rows, np.repeat(key, len(row))
            ).astype(np.int64)
        return window.packed.gather(row)

    def _forget(self, first: int) -> None:
        """Let go of the windows whose rows are all before `first`, but for the last."""
        while len(self.windows) > 1 and self.windows[0].end_row <= first:
            self.windows.pop(0)

    def _open_next(self, need: PrefetchRange) -> None:
        at = self.next
        window = self._wait(at, need)
        store = window.store
        if at.tokens and at.tokens != store.fingerprint:
            raise DataError(
                f"{self.name}: window {at.number} holds other tokens than when it was saved",
                "the source's files changed: bring them back, or start a new run",
            )
        packed = PACKINGS[self.table.packing](store, 0, store.num_tokens, self.table.seq_len)
        opened = OpenWindow(at.number, at.row, window.start, window.end, packed)
        if window.end.turn and not opened.end_row:
            raise DataError(
                f"{self.name}: all its documents together do not fill a row of "
                f"{self.table.seq_len} tokens",
                "give it more text, or lower data.seq_len",
            )
        if store.skipped:
            log.warning(
                "%s: %d documents skipped in window %d, such as %s",
                self.name, store.skipped, at.number, store.faults[0],
            )  # fmt: skip
        self.windows.append(opened)
        self.next = Next(at.number + 1, opened.end_row, window.end)

    def _wait(self, at: Next, need: PrefetchRange) -> Window:
        """Return a window when it is there; make sure that somebody makes it.

        Raises:
            DataError: nobody did.
            TrainerError: why nobody can.
        """
        started = time.monotonic()
        deaths, try_to_lead = 0, started
        while True:
            if self.child:
                self.child.tell(Start(at.number, at.place), need)
            window = open_window(self.producer.folder, at.number, self.producer.tokenizer)
            if window is not None and window.start == at.place:
                return window
            if self.failure:
                raise self.failure
            now = time.monotonic()
            if deaths > MAX_DEATHS or now - started > self.table.worker_timeout_seconds:
                raise DataError(
                    f"{self.name}: no tokens in {now - started:.0f} s",
                    "is the storage stalled, or memory short? data.worker_timeout_seconds sets "
                    "how long to wait",
                )
            if self.child:
                if not self.child.wait(POLL_SECONDS):
                    # It may have made this window before it failed with another.
                    self.failure, self.child = self.child.failure, None
                    deaths += 1
            elif now >= try_to_lead:
                try_to_lead = now + LOCK_SECONDS
                self.start_producer()
            else:
                time.sleep(POLL_SECONDS)


def stream_producer(
    source: DocumentSource, tokenizer: Tokenizer, table: Data, cache: Path, run: str, name: str
) -> Producer:
    """Return what makes a source's windows, in a folder that no other run or machine uses."""
    source = source.for_tokenizer(tokenizer)
    which = [platform.node(), os.path.abspath(run), name, table.seq_len, source.on_error]
    key = f"{which} {tokenizer.fingerprint} {source.content_fingerprint()}"
    folder = cache / "streams" / f"{source.name}-{xxh3_128_hexdigest(key.encode())}"
    _remove_abandoned(folder.parent)
    return Producer(source, tokenizer, folder, table.seq_len)


def _remove_abandoned(streams: Path) -> None:
    """Remove what runs left that ended long ago."""
    for lock in streams.glob("*/lock"):
        with suppress(OSError):
            if time.time() - lock.parent.stat().st_mtime > ABANDONED_SECONDS:
                with open(lock, "ab") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
