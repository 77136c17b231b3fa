"""The rows of a source that is tokenised during training."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, TrainerError
from ..core.hashing import GOLDEN, Words, mix
from ..core.processes import lock_file, unlock
from ..corpus.store import TokenStore
from ..sources.configs import DocumentSource
from ..tokenizers.tokenizer import Tokenizer
from .order import ENDLESS, Indices, permute
from .packing import PACKINGS, Packed, PackedRows
from .producer import Producer, ProducerProcess, start_producer
from .tables import Data
from .windows import Cursor, PrefetchRange, Window, WindowStart, open_window

# Windows that are tokenised before they are needed, and kept after.
AHEAD, BEHIND = 2, 2
# How often a killed producer is started again, such as one that ran out of memory. One that fails
# by an error would fail again, and ends the run.
MAX_DEATHS = 2
POLL_SECONDS = 0.02
# Between attempts to take over from a producer of another process, which may have ended.
LOCK_SECONDS = 1.0
ABANDONED_SECONDS = 7 * 24 * 3600

log = logging.getLogger(__name__)


class OpenWindow(NamedTuple):
    """A window cut into rows."""

    start: WindowStart
    end: Cursor
    """the position of the next window's first document"""
    packed: Packed

    @property
    def end_row(self) -> int:
        """The stream's rows up to the end of the window."""
        return self.start.row + self.packed.num_rows


class Stream:
    """The rows of a source, numbered from 0 without end, read in about this order.

    Row `n` depends on the source, the packing and the key alone; going back means reading from the
    start. Of the processes of a machine that read the same stream for a run, one has a child that
    tokenises; all map the windows that the child writes.

    Args:
        name: the name of the stream in messages.
        producer: makes the windows, in a folder of this run and this machine.
        table: the `[data]` table.
        key: the key of the shuffle.
    """

    num_rows = ENDLESS

    def __init__(self, name: str, producer: Producer, table: Data, key: int) -> None:
        self.name = name
        self.producer = producer
        self.table = table
        self.key = np.array([key], dtype=np.uint64)
        self.child: ProducerProcess | None = None
        self.failure: TrainerError | None = None
        self.windows: list[OpenWindow] = []
        self.next = WindowStart()
        self.fingerprint = producer.source.content_fingerprint()

    @property
    def store(self) -> TokenStore:
        """The newest window's tokens."""
        return self.windows[-1].packed.store

    def start_producer(self) -> None:
        """Start the process that tokenises, unless another process of this machine has one."""
        self.child = self.child or start_producer(self.producer)

    def state(self, row: int) -> dict[str, Any]:
        """Return what a run on any machine needs to resume at a row that is ready; JSON."""
        start = self.next
        for window in self.windows:
            if window.start.row <= row:
                start = window.start._replace(tokens=window.packed.store.fingerprint)
        return {
            "window": start.number,
            "row": start.row,
            "place": list(start.cursor),
            "tokens": start.tokens,
            "source": self.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken; a stream that has been read already stays as it is."""
        if not self.windows:
            tokens = state["tokens"] if state["source"] == self.fingerprint else ""
            self.next = WindowStart(state["window"], state["row"], Cursor(*state["place"]), tokens)

    def ensure(self, first: int, stop: int) -> None:
        """Make rows `first` to `stop - 1` ready; rows before `first` are not needed any more.

        Raises:
            DataError: a document cannot be read, or the source has changed.
        """
        oldest = self.windows[0].start if self.windows else self.next
        if first < oldest.row:
            # An earlier row than those at hand, or the mixture is not the one that was saved.
            self.windows, self.child = [], None
            oldest = self.next = WindowStart()
        while not self.windows or self.windows[-1].end_row < stop:
            # Ranks reach the same rows, if not at the same moment: none must find a window deleted.
            keep = max(oldest.number - BEHIND, 0)
            self._open_next(PrefetchRange(keep, self.next.number + AHEAD))
            self._close_before(first)
        self._close_before(first)

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B], ascending; `ensure` has made them ready."""
        starts = [window.start.row for window in self.windows]
        which = np.searchsorted(starts, rows, side="right") - 1
        return PackedRows.concatenate(
            self._gather(self.windows[index], rows[which == index]) for index in np.unique(which)
        )

    def _gather(self, window: OpenWindow, rows: Indices) -> PackedRows:
        row = rows - window.start.row
        if self.table.shuffle:
            # A key for each window: no row moves to another window, so that few are open at a time.
            key: Words = mix(self.key + np.array([window.start.number], np.uint64) * GOLDEN)
            row = permute(
                row.astype(np.uint64), window.packed.num_rows, np.repeat(key, len(row))
            ).astype(np.int64)
        return window.packed.gather(row)

    def _close_before(self, first: int) -> None:
        """Drop the windows whose rows are all before `first`, except the last window."""
        while len(self.windows) > 1 and self.windows[0].end_row <= first:
            self.windows.pop(0)

    def _open_next(self, needed: PrefetchRange) -> None:
        start = self.next
        window = self._wait(start, needed)
        store = window.store
        if start.tokens and start.tokens != store.fingerprint:
            raise DataError(
                f"{self.name}: window {start.number} holds other tokens than when it was saved",
                "the source's files changed: bring them back, or start a new run",
            )
        packed = PACKINGS[self.table.packing](store, 0, store.num_tokens, self.table.seq_len)
        opened = OpenWindow(start, window.end, packed)
        # A window without a row is fine, but not a whole epoch without one: reading on is endless.
        if window.end.epoch and not opened.end_row:
            raise DataError(
                f"{self.name}: all its documents together do not fill a row of "
                f"{self.table.seq_len} tokens",
                "give it more text, or lower data.seq_len",
            )
        if store.skipped:
            log.warning(
                "%s: %d documents skipped in window %d, such as %s",
                self.name, store.skipped, start.number, store.faults[0],
            )  # fmt: skip
        self.windows.append(opened)
        self.next = WindowStart(start.number + 1, opened.end_row, window.end)

    def _wait(self, start: WindowStart, needed: PrefetchRange) -> Window:
        """Return a window once it is on disk, and make sure that a process tokenises it.

        Raises:
            DataError: no process did in time.
            TrainerError: the process that tokenises failed.
        """
        started = time.monotonic()
        deaths, next_attempt = 0, started
        while True:
            if self.child:
                self.child.request(start, needed)
            window = open_window(self.producer.folder, start.number, self.producer.tokenizer)
            if window is not None and window.start == start.cursor:
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
                if not self.child.is_alive(POLL_SECONDS):
                    # It may have written this window before it failed with another.
                    self.failure, self.child = self.child.failure, None
                    deaths += 1
            elif now >= next_attempt:
                next_attempt = now + LOCK_SECONDS
                self.start_producer()
            else:
                time.sleep(POLL_SECONDS)


def stream_producer(
    source: DocumentSource, tokenizer: Tokenizer, table: Data, cache: Path, run: str, name: str
) -> Producer:
    """Return the producer of a source's windows, in a folder of this run and this machine."""
    source = source.for_tokenizer(tokenizer)
    user = [platform.node(), os.path.abspath(run), name, table.seq_len, source.on_error]
    key = f"{user} {tokenizer.fingerprint} {source.content_fingerprint()}"
    folder = cache / "streams" / f"{source.name}-{xxh3_128_hexdigest(key.encode())}"
    _delete_abandoned(folder.parent)
    return Producer(source, tokenizer, folder, table.seq_len)


def _delete_abandoned(streams: Path) -> None:
    """Delete the windows of runs that ended long ago."""
    for lock in streams.glob("*/lock"):
        with suppress(OSError):
            if time.time() - lock.parent.stat().st_mtime > ABANDONED_SECONDS:
                # A producer that lives holds the lock: this raises, and its windows stay.
                descriptor = lock_file(lock)
                shutil.rmtree(lock.parent, ignore_errors=True)
                unlock(descriptor)
