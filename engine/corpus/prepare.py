"""Tokenises sources of documents once; later runs memory-map the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, EnvironmentFault, RecipeError
from ..core.files import publish
from ..core.text.display import remove_secrets
from ..sources.configs import DocumentSource, SourceConfig, SourcePart
from ..tokenizers.tokenizer import Tokenizer
from .cache import discard_other_inputs, hold_lock, open_or_make, unfinished_folder
from .configs import TokensSource
from .manifest import INDEX, TOKENIZER_FOLDER, read_manifest
from .merging.near_duplicates import make_filter
from .merging.preparation import Preparation as Preparation
from .part_stores import PartStores
from .progress import TokenisingProgress, Watch, log_every_ten_seconds
from .store import StoreWriter, TokenStore
from .tokenise import Chunk, tokenise

# Part of the names in the cache: another number makes every source be tokenised again.
CACHE_VERSION = 1
DYING_SECONDS = 1.0


def open_source(source: SourceConfig, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """Return the documents of a source as tokens, memory-mapped.

    Args:
        source: the config of the source.
        tokenizer: the tokenizer.
        cache: folder of tokenised documents; a `DocumentSource` that is not there yet is tokenised
            into it first.

    Raises:
        DataError: a document cannot be read; the message names file and line.
    """
    if isinstance(source, DocumentSource):
        return open_or_prepare(source.for_tokenizer(tokenizer), tokenizer, cache)
    store: TokenStore = source.open(tokenizer, cache)  # type: ignore[attr-defined] # a plugin's need not be a TokenSource
    return store


def open_stores(source: SourceConfig, tokenizer: Tokenizer, cache: Path) -> list[TokenStore]:
    """Return the documents of a source as tokens; a glob of folders has a store for each folder.

    Args:
        source: the config of the source.
        tokenizer: the tokenizer.
        cache: see `open_source`.

    Raises:
        DataError: see `open_source`.
    """
    if not isinstance(source, TokensSource) or not _is_glob(source.path):
        return [open_source(source, tokenizer, cache)]
    folders = sorted(match for match in glob(source.path) if (Path(match) / INDEX).is_file())
    if not folders:
        raise DataError(f"{source.path}: no folder of tokens", f"each of them holds {INDEX}")
    return [TokenStore.open(Path(folder), tokenizer) for folder in folders]


def _is_glob(path: str) -> bool:
    return has_magic(path) and not Path(path).exists()


def open_or_prepare(source: DocumentSource, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """Return the tokens of a source from the cache, and tokenise the source first if needed.

    If several processes need the same source, one tokenises and the others wait for the lock. An
    incomplete folder in the cache is made again.

    Raises:
        DataError: a document cannot be read and `on_error` is "stop", or there is no text.
        EnvironmentFault: the cache cannot be written.
    """
    key = f"{CACHE_VERSION} {tokenizer.fingerprint} {source.on_error} {source.fingerprint()}"
    folder = cache / f"{source.name}-{xxh3_128_hexdigest(key.encode())}"
    watch = log_every_ten_seconds(source.name)
    return open_or_make(
        folder,
        lambda: TokenStore.open(folder, tokenizer),
        lambda: prepare(Preparation([source], tokenizer), folder, watch),
        remove_secrets(str(getattr(source, "path", ""))),
    )


def prepare_folder(job: Preparation, folder: Path, watch: Watch) -> bool:
    """Prepare a folder of tokens, or resume an interrupted preparation.

    Args:
        job: the inputs.
        folder: the folder to create.
        watch: called after each chunk of documents.

    Returns:
        True if this call made the folder, False if it was complete before.

    Raises:
        RecipeError: the folder holds something else, or lies within a source.
        RunInUse: another process prepares the folder.
        DataError: a document cannot be read and `on_error` is "stop", or there is no text.
        EnvironmentFault: the folder cannot be written.
    """
    return make_once(folder, job.inputs(), lambda: prepare(job, _absolute(folder), watch))


def _absolute(folder: Path) -> Path:
    return Path(os.path.abspath(folder))  # "." has no name, and so nothing can lie beside it


def make_once(folder: Path, inputs: str, make: Callable[[], None]) -> bool:
    """Make a folder of tokens unless it is there.

    Args:
        folder: the folder to create.
        inputs: a hash of everything that the tokens depend on.
        make: writes it.

    Returns:
        True if this call made the folder, False if it was complete before.

    Raises:
        RecipeError: the folder holds something else.
        RunInUse: another process makes the folder.
        EnvironmentFault: the folder cannot be written.
    """
    folder = _absolute(folder)
    try:
        with _lock_target(folder):
            if is_new := not folder.exists() or not any(folder.iterdir()):
                make()
            else:
                _require_same_inputs(inputs, folder)
                shutil.rmtree(unfinished_folder(folder), ignore_errors=True)
            return is_new
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {folder}: {error.strerror}",
            "once it is writable and has room, the same command resumes where it stopped",
        ) from error


def _require_same_inputs(inputs: str, folder: Path) -> None:
    other = "give another folder, or delete this one"
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        raise RecipeError(f"{folder} is there already: {error.message}", other) from error
    if manifest.inputs != inputs:
        raise RecipeError(
            f"{folder} is there already, made from other documents or settings", other
        )


@contextmanager
def _lock_target(folder: Path) -> Iterator[None]:
    """Lock a folder against other preparations; at the end, remove work without finished parts."""
    lock, work = folder.parent / f".{folder.name}.lock", unfinished_folder(folder)
    # The workers of a killed preparation hold the lock until they end, shortly after it.
    with hold_lock(lock, DYING_SECONDS):
        try:
            yield
        finally:
            if not any((work / "parts").glob("*")):
                shutil.rmtree(work, ignore_errors=True)
            lock.unlink()


def prepare(job: Preparation, folder: Path, watch: Watch) -> None:
    """Tokenise into a folder, which appears under its name only when it is complete.

    Parts that an interrupted call with the same inputs finished are reused. The caller must hold
    the lock.

    Raises:
        RecipeError: the folder lies within a source, which would read what is written there.
        DataError: a document cannot be read, there is no text, or the sources changed meanwhile.
        EnvironmentFault: a worker process was killed.
        OSError: the folder cannot be written.
    """
    work, inputs, parts = unfinished_folder(folder), job.inputs(), job.parts()
    discard_other_inputs(work, inputs)
    # The working folder exists now: if it changes the inputs, it lies within a source.
    if job.inputs() != inputs:
        shutil.rmtree(work)
        raise RecipeError(
            f"{folder} lies within a source, which would read what is written there",
            "choose a folder outside of the source's folder",
        )
    shutil.rmtree(work / "store", ignore_errors=True)
    progress, duplicates = TokenisingProgress(len(parts)), make_filter(job.dedup)
    with StoreWriter(work / "store", job.tokenizer, job.shard_tokens) as writer:
        for chunk in _tokenise_parts(job, parts, work / "parts", progress):
            writer.write(duplicates.drop(chunk) if duplicates else chunk)
            progress.documents, progress.tokens = writer.num_documents, writer.num_tokens
            watch(progress)
        names = ", ".join(sorted({f'"{source.name}"' for source in job.sources}))
        if not writer.num_tokens:
            raise DataError(f"the {names} source holds no text ({writer.tally.skipped} skipped)")
        if job.inputs() != inputs:
            raise DataError(f"the {names} source changed while it was tokenised", "run it again")
        writer.tally.faults = [str(fault) for fault in writer.tally.faults]
        if job.tokenizer_name:
            bundled = work / "store" / TOKENIZER_FOLDER
            bundled.mkdir()
            job.tokenizer.save(bundled)
        writer.finish(
            inputs=inputs,
            tokenizer_name=job.tokenizer_name,
            sources=[remove_secrets(source.model_dump(mode="json")) for source in job.sources],
            dedup=job.dedup,
            part=job.describe_share(),
        )
    publish(work / "store", folder)
    shutil.rmtree(work, ignore_errors=True)


def _tokenise_parts(
    job: Preparation, parts: Sequence[SourcePart], folder: Path, progress: TokenisingProgress
) -> Iterator[Chunk]:
    """Yield the tokens of all parts in order."""
    if len(parts) == 1:  # a single part gains nothing from a worker process
        ((source, part),) = parts
        for chunk in tokenise(source.read(part), source.on_error, job.tokenizer):
            progress.count(chunk)
            yield chunk
        return
    stores = PartStores(folder, parts, job.tokenizer)
    workers = job.workers or len(os.sched_getaffinity(0))
    for number, is_new in enumerate(stores.make_all(workers)):
        chunk = stores.read(number)
        progress.parts_done += 1
        if is_new:
            progress.count(chunk)
        else:
            progress.parts_found += 1
        yield chunk
