"""Tokenises the parts of a corpus in parallel processes.

Each part becomes a token store of its own, committed by a rename. An interrupted preparation
reuses the parts that are complete.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DataError, EnvironmentFault
from ..core.files import publish
from ..core.processes import die_with_parent
from ..sources.configs import DocumentSource, SourcePart
from ..tokenizers.tokenizer import PARALLELISM, Tokenizer
from .manifest import FileList, find_damaged_files, read_manifest
from .store import StoreWriter, TokenStore
from .tokenise import Chunk, Tally, tokenise

# Parts that are submitted ahead, which bounds the memory that queued tasks take.
AHEAD = 4096


@dataclass(frozen=True)
class PartStores:
    """The parts of a corpus as token stores.

    Args:
        folder: holds a store for each part that is done.
        parts: the parts in order.
        tokenizer: makes the tokens.
    """

    folder: Path
    parts: Sequence[SourcePart]
    tokenizer: Tokenizer

    def make(self, number: int) -> bool:
        """Tokenise a part unless an intact store of it exists.

        Returns:
            True if this call tokenised the part.
        """
        folder = self.part_folder(number)
        with suppress(DataError):
            if not any(find_damaged_files(folder, self.read_index(folder))):
                return False
        unfinished = folder.with_suffix(".unfinished")
        for leftover in (folder, unfinished):
            shutil.rmtree(leftover, ignore_errors=True)
        self.write(*self.parts[number], unfinished)
        publish(unfinished, folder)
        return True

    def write(self, source: DocumentSource, part: Any, folder: Path) -> None:
        """Tokenise a part of a source into a new folder."""
        with StoreWriter(folder, self.tokenizer) as writer:
            for chunk in tokenise(source.read(part), source.on_error, self.tokenizer):
                writer.write(chunk)
            writer.finish()

    def read_index(self, folder: Path) -> FileList:
        """Return the index of a part's folder.

        Raises:
            DataError: the folder is missing or incomplete.
        """
        return read_manifest(folder)

    def read(self, number: int) -> Chunk:
        """Return the tokens of a complete part, memory-mapped."""
        folder = self.part_folder(number)
        manifest, store = read_manifest(folder), TokenStore.open(folder, self.tokenizer)
        tally = Tally(manifest.text_bytes, manifest.empty, manifest.skipped, manifest.faults)
        return Chunk(store.tokens, np.diff(store.offsets), store.loss_mask, tally)

    def part_folder(self, number: int) -> Path:
        """Return the folder of a part."""
        return self.folder / f"{number:07d}"

    def make_all(self, workers: int) -> Iterator[bool]:
        """Tokenise every part; yield for each part, in order, whether this call tokenised it.

        Args:
            workers: the largest number of processes.

        Raises:
            DataError: a document cannot be read and `on_error` is "stop".
            EnvironmentFault: a worker process was killed.
            OSError: a part cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.enable_fast_encoding()
        with _processes(self, min(workers, len(self.parts))) as pool:
            made: deque[Future[bool]] = deque()
            waiting = iter(range(len(self.parts)))
            while True:
                made.extend(pool.submit(_make, n) for n in islice(waiting, AHEAD - len(made)))
                if not made:
                    return
                try:
                    yield made.popleft().result()
                except BrokenProcessPool as error:
                    raise EnvironmentFault(
                        "a process that tokenises was killed",
                        "out of memory? fewer workers need less; "
                        "the same command resumes where it stopped",
                    ) from error


@contextmanager
def _processes(stores: PartStores, workers: int) -> Iterator[ProcessPoolExecutor]:
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers,
        # Forked: they start at once, and a script that trains needs no `if __name__` guard.
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(stores, os.getpid()),
    )
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_stores: PartStores


def _begin(stores: PartStores, parent: int) -> None:
    global _stores
    _stores = stores
    die_with_parent(parent)
    os.environ[PARALLELISM] = "false"  # the processes are the parallelism


def _make(number: int) -> bool:
    return _stores.make(number)
