"""Merges the parts of a corpus that several machines prepared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import DataError, RecipeError
from ...core.files import publish
from ...tokenizers.tokenizer import Tokenizer
from ..cache import unfinished_folder
from ..manifest import TOKENIZER_FOLDER, CorpusManifest, find_damaged_files, read_manifest
from ..prepare import make_once
from ..progress import TokenisingProgress, Watch
from ..retokenize import load_bundled_tokenizer
from ..store import StoreWriter, TokenStore
from ..tokenise import Chunk, Tally
from .near_duplicates import make_filter
from .preparation import combine_inputs

CHUNK_TOKENS = 2**24


def merge_parts(folders: Sequence[Path], folder: Path, dedup: str, watch: Watch) -> bool:
    """Merge the parts of a corpus into a folder with the bytes that one machine would have made.

    Args:
        folders: the folders of all parts, in any order.
        folder: the folder to create.
        dedup: which documents are left out; see `parse_dedup`.
        watch: called after each part.

    Returns:
        True if this call made the folder, False if it was complete before.

    Raises:
        RecipeError: a part is missing or of another corpus, or the folder holds something else.
        DataError: a file of a part is missing or damaged.
        RunInUse: another process makes the folder.
        EnvironmentFault: the folder cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    parts = {place: read_manifest(place) for place in folders}
    ordered = _order_parts(parts)
    first = parts[ordered[0]]
    assert first.part is not None, "all have one"
    inputs = combine_inputs(first.part.inputs, dedup=dedup)

    def write() -> None:
        work = unfinished_folder(folder)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        tokenizer, duplicates = load_bundled_tokenizer(ordered[0]), make_filter(dedup)
        progress = TokenisingProgress(len(ordered))
        with StoreWriter(work / "store", tokenizer, first.shard_tokens) as writer:
            for place in ordered:
                _require_intact(place, parts[place])
                for chunk in _read_chunks(place, parts[place], tokenizer):
                    writer.write(duplicates.drop(chunk) if duplicates else chunk)
                progress.parts_done += 1
                progress.documents, progress.tokens = writer.num_documents, writer.num_tokens
                watch(progress)
            shutil.copytree(ordered[0] / TOKENIZER_FOLDER, work / "store" / TOKENIZER_FOLDER)
            writer.finish(
                inputs=inputs,
                tokenizer_name=first.tokenizer_name,
                sources=first.sources,
                dedup=dedup,
            )
        publish(work / "store", folder)
        shutil.rmtree(work, ignore_errors=True)

    return make_once(folder, inputs, write)


def _order_parts(parts: dict[Path, CorpusManifest]) -> list[Path]:
    """Return the folders in the order of the parts, which are all there, each once."""
    numbers: dict[int, Path] = {}
    first: CorpusManifest | None = None
    for place, manifest in parts.items():
        part = manifest.part
        if part is None:
            hint = "`trainer data prepare --part 1/N` makes the first of N"
            raise RecipeError(f"{place} is no part of a corpus", hint)
        first = first or manifest
        assert first.part is not None, "checked above"
        if (part.contents, part.of) != (first.part.contents, first.part.of):
            other = next(iter(parts))
            message = f"{place} and {other} are parts of different documents, settings or numbers"
            raise RecipeError(message, "prepare all parts with the same command but for --part")
        if part.number in numbers:
            raise RecipeError(f"{place} and {numbers[part.number]} are both part {part.number}")
        numbers[part.number] = place
    assert first is not None, "at least one folder is given"
    assert first.part is not None, "checked above"
    missing = [str(n) for n in range(1, first.part.of + 1) if n not in numbers]
    if missing:
        raise RecipeError(f"part {', '.join(missing)} of {first.part.of} is missing")
    return [numbers[number] for number in sorted(numbers)]


def _require_intact(place: Path, manifest: CorpusManifest) -> None:
    for name in find_damaged_files(place, manifest):
        raise DataError(f"{place / name}: its checksum differs", "prepare this part again")


def _read_chunks(place: Path, manifest: CorpusManifest, tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Yield the documents of a part, some at a time; the first ones have the counts of all."""
    store = TokenStore.open(place, tokenizer)
    tally = Tally(manifest.text_bytes, manifest.empty, manifest.skipped, list(manifest.faults))
    first = 0
    while first < store.num_documents:
        start = int(store.offsets[first])
        last = int(np.searchsorted(store.offsets, start + CHUNK_TOKENS, side="right")) - 1
        last = max(last, first + 1)
        stop = int(store.offsets[last])
        mask = None if store.loss_mask is None else store.loss_mask[start:stop]
        lengths = np.diff(store.offsets[first : last + 1])
        yield Chunk(store.tokens[start:stop], lengths, mask, tally)
        first, tally = last, Tally()
