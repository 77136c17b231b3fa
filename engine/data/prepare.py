"""Tokenises a source of documents once; later runs memory-map the result."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from ..errors import DataError, EnvironmentFault
from ..files import sync_folder
from .configs import Document, DocumentFault, DocumentSource
from .store import FORMAT, StoreWriter, TokenStore
from .tokenizer import Tokenizer

BATCH_CHARACTERS = 2**22
BATCH_DOCUMENTS = 2**12
FAULTS_KEPT = 20
NOTE_SECONDS = 10.0

log = logging.getLogger(__name__)


def default_cache() -> Path:
    """Return the user's cache folder for tokenised sources."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise EnvironmentFault("this user has no home folder", "set data.cache_dir") from error
    return base / "trainer" / "tokens"


def open_or_prepare(source: DocumentSource, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """Return the source's tokens from the cache, tokenising it first if they are not there.

    Of many processes that ask at once, one tokenises and the others wait. A cached folder that is
    incomplete is made again.

    Raises:
        DataError: a document cannot be read and `on_error` is "stop", or there is no text.
        EnvironmentFault: the cache cannot be written.
    """
    key = f"{FORMAT} {tokenizer.fingerprint} {source.on_error} {source.fingerprint()}"
    folder = cache / f"{source.name}-{xxh3_128_hexdigest(key.encode())}"
    with suppress(DataError):
        return TokenStore.open(folder, tokenizer)
    try:
        with _locked(cache, folder.name):
            with suppress(DataError):
                return TokenStore.open(folder, tokenizer)
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            for leftover in (folder, unfinished):
                shutil.rmtree(leftover, ignore_errors=True)
            _prepare(source, tokenizer, unfinished)
            unfinished.rename(folder)
            sync_folder(cache)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {cache}: {error.strerror}",
            "set data.cache_dir to a folder that is writable and has room",
        ) from error
    return TokenStore.open(folder, tokenizer)


@contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    """Hold the cache entry's lock; the kernel frees it however the process ends."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process to tokenise %s", name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(source: DocumentSource, tokenizer: Tokenizer, folder: Path) -> None:
    skipped = 0
    faults: list[str] = []
    with StoreWriter(folder, tokenizer) as writer:
        started = noted = time.monotonic()
        for batch in _batches(source.documents()):
            unreadable = [item for item in batch if isinstance(item, DocumentFault)]
            if unreadable and source.on_error == "stop":
                raise DataError(
                    f"{unreadable[0].place}: {unreadable[0].reason}",
                    'repair it, or leave such documents out with on_error = "skip"',
                )
            skipped += len(unreadable)
            faults += [f"{fault.place}: {fault.reason}" for fault in unreadable]
            del faults[FAULTS_KEPT:]
            # An empty document has nothing to predict.
            if texts := [item for item in batch if isinstance(item, str) and item]:
                writer.append(tokenizer.encode_batch(texts))
            if time.monotonic() - noted > NOTE_SECONDS:
                noted = time.monotonic()
                log.info(
                    "tokenising %s: %.0f million tokens in %.0f s",
                    source.name, writer.num_tokens / 1e6, noted - started,
                )  # fmt: skip
        if not writer.num_tokens:
            raise DataError(f'the "{source.name}" source holds no text ({skipped} skipped)')
        writer.finish(skipped, faults)


def _batches(
    documents: Iterable[Document],
) -> Iterator[list[Document]]:
    """Group documents so that a batch is worth a call and fits in memory."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document) if isinstance(document, str) else 0
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
