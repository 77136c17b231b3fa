"""Tokenises sources of documents once; later runs memory-map the result."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, EnvironmentFault, Problem, RecipeError, RunInUse
from ..core.files import atomic_write, sync_folder
from ..core.text.display import remove_secrets
from ..sources.configs import DocumentSource, SourceConfig, SourcePart
from ..tokenizers.tokenizer import Tokenizer
from .manifest import TOKENIZER_FOLDER, read_manifest
from .part_stores import PartStores
from .progress import TokenisingProgress, Watch, log_every_ten_seconds
from .store import SHARD_TOKENS, StoreWriter, TokenStore
from .tokenise import Tokenised, tokenise

# Part of the names in the cache: another number makes every source be tokenised again.
CACHE_VERSION = 1
DYING_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """What becomes one folder of tokens.

    Attributes:
        sources: their documents come one source after another.
        tokenizer: makes the tokens.
        tokenizer_name: what a recipe calls it; its files are then kept beside the tokens.
        shard_tokens: tokens a file.
        workers: processes; 0: one a core.
    """

    sources: Sequence[DocumentSource]
    tokenizer: Tokenizer
    tokenizer_name: str = ""
    shard_tokens: int = SHARD_TOKENS
    workers: int = 0

    def inputs(self) -> str:
        """Return a hash of all that the result depends on."""
        states = [f"{source.on_error} {source.fingerprint()}" for source in self.sources]
        inputs = [self.tokenizer.fingerprint, self.tokenizer_name, self.shard_tokens, states]
        return xxh3_128_hexdigest(repr(inputs).encode())

    def parts(self) -> list[SourcePart]:
        """Return the parts of every source, in order."""
        return [(source, part) for source in self.sources for part in source.parts()]


def default_cache() -> Path:
    """Return the user's cache folder for tokenised sources."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise EnvironmentFault("this user has no home folder", "set data.cache_dir") from error
    return base / "trainer" / "tokens"


def cache_folder(folder: str) -> Path:
    """Return where tokenised sources are kept.

    Args:
        folder: `data.cache_dir` of the recipe; empty: in the user's cache.
    """
    try:
        return Path(folder).expanduser() if folder else default_cache()
    except RuntimeError as error:
        problem = Problem(f"no home folder for {folder!r}", key="data.cache_dir")
        raise RecipeError([problem]) from error


def open_source(source: SourceConfig, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """Return a source's documents as tokens, memory-mapped.

    Args:
        cache: folder of tokenised documents; those of a `DocumentSource` are written to it first
            if they are not there yet.

    Raises:
        DataError: with file and line.
    """
    if isinstance(source, DocumentSource):
        return open_or_prepare(source.for_tokenizer(tokenizer), tokenizer, cache)
    store: TokenStore = source.open(tokenizer, cache)  # type: ignore[attr-defined] # a plugin's need not be a TokenSource
    return store


def open_or_prepare(source: DocumentSource, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """Return the source's tokens from the cache, tokenising it first if they are not there.

    Of many processes that ask at once, one tokenises and the others wait. A cached folder that is
    incomplete is made again.

    Raises:
        DataError: a document cannot be read and `on_error` is "stop", or there is no text.
        EnvironmentFault: the cache cannot be written.
    """
    key = f"{CACHE_VERSION} {tokenizer.fingerprint} {source.on_error} {source.fingerprint()}"
    folder = cache / f"{source.name}-{xxh3_128_hexdigest(key.encode())}"
    if not unfinished(folder).exists():
        with suppress(DataError):
            return TokenStore.open(folder, tokenizer)
    try:
        with _locked(cache / f"{folder.name}.lock", wait=True):
            with suppress(DataError):
                store = TokenStore.open(folder, tokenizer)
                shutil.rmtree(unfinished(folder), ignore_errors=True)
                return store
            shutil.rmtree(folder, ignore_errors=True)
            prepare(Preparation([source], tokenizer), folder, log_every_ten_seconds(source.name))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {cache}: {error.strerror}",
            "set data.cache_dir to a folder that is writable and has room",
        ) from error
    return TokenStore.open(folder, tokenizer)


def prepare_folder(job: Preparation, folder: Path, watch: Watch) -> bool:
    """Make a folder of tokens, or go on making it; return whether it was not there yet.

    Raises:
        RecipeError: something else is there, or the source would read the folder itself.
        RunInUse: another process makes it.
        DataError: a document cannot be read and `on_error` is "stop", or there is no text.
        EnvironmentFault: it cannot be written.
    """
    folder = Path(os.path.abspath(folder))  # "." has no name, and so nothing can lie beside it
    try:
        with _alone(folder):
            if is_new := not folder.exists() or not any(folder.iterdir()):
                prepare(job, folder, watch)
            else:
                _expect_same(job, folder)
                shutil.rmtree(unfinished(folder), ignore_errors=True)
            return is_new
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {folder}: {error.strerror}",
            "once it is writable and has room, the same command resumes where it stopped",
        ) from error


def _expect_same(job: Preparation, folder: Path) -> None:
    other = "give another folder, or delete this one"
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        raise RecipeError(f"{folder} is there already: {error.message}", other) from error
    if manifest.inputs != job.inputs():
        raise RecipeError(
            f"{folder} is there already, made from other documents or settings", other
        )


def unfinished(folder: Path) -> Path:
    """Return where a preparation keeps what it has until it is complete."""
    return folder.parent / f"{folder.name}.unfinished"


@contextmanager
def _locked(file: Path, wait: bool) -> Iterator[None]:
    """Hold a lock; the kernel frees it however the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab") as lock:
        # Those that worked for a process that was killed end just after it.
        deadline = time.monotonic() + DYING_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if wait:
                    log.info("waiting for another process to tokenise %s", file.stem)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    break
                if time.monotonic() > deadline:
                    raise RunInUse(f"{file}: another process makes these tokens") from error
                time.sleep(0.05)
        if not _is_at(file, lock):  # who had it has just ended, and removed it
            raise RunInUse(f"{file}: another process made these tokens just now", "try again")
        yield


def _is_at(file: Path, opened: IO[bytes]) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samefile(file, opened.fileno())
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from making a folder; leave nothing that is of no use to them."""
    lock, work = folder.parent / f".{folder.name}.lock", unfinished(folder)
    with _locked(lock, wait=False):
        try:
            yield
        finally:
            if not any((work / "parts").glob("*")):
                shutil.rmtree(work, ignore_errors=True)
            lock.unlink()


def prepare(job: Preparation, folder: Path, watch: Watch) -> None:
    """Tokenise into a folder, which appears when it is complete.

    What an interrupted call for the same inputs left is used. The caller holds a lock.

    Raises:
        RecipeError: the folder lies within a source, which would read what is written there.
        DataError: a document cannot be read, there is no text, or the sources changed meanwhile.
        EnvironmentFault: a process that tokenises was killed.
        OSError: it cannot be written.
    """
    work, inputs, parts = unfinished(folder), job.inputs(), job.parts()
    _keep_what_fits(work, inputs)
    if job.inputs() != inputs:
        shutil.rmtree(work)
        raise RecipeError(
            f"{folder} lies within a source, which would read what is written there",
            "choose a folder outside of the source's folder",
        )
    shutil.rmtree(work / "store", ignore_errors=True)
    progress = TokenisingProgress(len(parts))
    with StoreWriter(work / "store", job.tokenizer, job.shard_tokens) as writer:
        for piece in _tokenised(job, parts, work / "parts", progress):
            writer.write(piece)
            progress.documents, progress.tokens = writer.num_documents, writer.num_tokens
            watch(progress)
        names = ", ".join(sorted({f'"{source.name}"' for source in job.sources}))
        if not writer.num_tokens:
            raise DataError(f"the {names} source holds no text ({writer.tally.skipped} skipped)")
        if job.inputs() != inputs:
            raise DataError(f"the {names} source changed while it was tokenised", "run it again")
        writer.tally.faults = [str(fault) for fault in writer.tally.faults]
        if job.tokenizer_name:
            kept = work / "store" / TOKENIZER_FOLDER
            kept.mkdir()
            job.tokenizer.save(kept)
        writer.finish(
            inputs=inputs,
            tokenizer_name=job.tokenizer_name,
            sources=[remove_secrets(source.model_dump(mode="json")) for source in job.sources],
        )
    (work / "store").rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(work, ignore_errors=True)


def _keep_what_fits(work: Path, inputs: str) -> None:
    """Empty the working folder unless it belongs to the same inputs."""
    plan = work / "inputs"
    if work.exists() and not (plan.is_file() and plan.read_text(errors="replace") == inputs):
        log.info("%s is of other documents or settings: starting afresh", work)
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    atomic_write(plan, inputs)


def _tokenised(
    job: Preparation, parts: Sequence[SourcePart], folder: Path, progress: TokenisingProgress
) -> Iterator[Tokenised]:
    """Yield the documents of all parts in order."""
    if len(parts) == 1:  # not worth a process
        ((source, part),) = parts
        for piece in tokenise(source.read(part), source.on_error, job.tokenizer):
            progress.count(piece)
            yield piece
        return
    stores = PartStores(folder, parts, job.tokenizer)
    workers = job.workers or len(os.sched_getaffinity(0))
    for number, is_new in enumerate(stores.make_all(workers)):
        piece = stores.read(number)
        progress.parts_done += 1
        if is_new:
            progress.count(piece)
        else:
            progress.parts_found += 1
        yield piece
