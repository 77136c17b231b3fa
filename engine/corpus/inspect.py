"""Inspects a corpus of tokens: counts, lengths, duplicates, samples, damage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ..core.errors import DataError
from ..tokenizers.tokenizer import SpecialTokenDecoder, Tokenizer
from .manifest import OFFSETS, find_damaged_files, list_unchecked_files, read_manifest
from .retokenize import load_bundled_tokenizer
from .store import TokenStore

SAMPLE_TOKENS = 200


@dataclass(frozen=True)
class Duplicates:
    """Counts of documents whose tokens equal those of an earlier document."""

    documents: int
    tokens: int
    most_frequent: int
    """index of the document that occurs most often"""
    times: int
    """number of occurrences of the most frequent document"""


@dataclass(frozen=True)
class LengthBin:
    """The number of documents with lengths from `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    documents: int


@dataclass(frozen=True)
class LossPiece:
    """A run of tokens of a document."""

    text: str
    in_loss: bool


@dataclass(frozen=True)
class Inspection:
    """The counts, lengths, duplicates and damage of a corpus of tokens.

    Lengths do not count the end-of-document token.
    """

    place: str
    tokens: int
    documents: int
    learned_tokens: int
    """tokens that count in the loss"""
    empty: int
    """number of documents without tokens, stored ones and ones left out during preparation"""
    skipped: int
    """number of documents that could not be read"""
    faults: list[str]
    text_bytes: int | None
    """bytes of the documents' text, or None if it is not known"""
    tokenizer: str
    mean_length: float
    quantiles: dict[str, int]
    histogram: list[LengthBin]
    duplicates: Duplicates
    damaged: list[str]
    """names of the damaged files"""
    unchecked: list[str]
    """names of files without checksums, which older versions did not write"""
    samples: dict[int, str]
    """decoded beginnings of documents, by index of the document"""
    loss_samples: dict[int, list[LossPiece]]
    """the same with special tokens, in pieces whose tokens all count in the loss or do not; empty
    where every token of the corpus counts"""


def inspect_folder(folder: Path, samples: int, tokenizer: Tokenizer | None = None) -> Inspection:
    """Inspect a folder of tokens and verify the checksums of all its files.

    Args:
        folder: the folder of the store.
        samples: the number of documents to decode.
        tokenizer: the tokenizer of the tokens; None takes the one that is stored beside them.

    Raises:
        DataError: the folder is incomplete or holds no documents.
    """
    manifest, store = read_manifest(folder), TokenStore.open(folder, None)
    damaged = list(find_damaged_files(folder, manifest))
    if not damaged and (np.diff(store.offsets) < 1).any():
        damaged = [OFFSETS]
    if manifest.tokenizer_name and not damaged and not tokenizer:
        tokenizer = load_bundled_tokenizer(folder)
    inspection = inspect_store(store, None if damaged else tokenizer, samples)
    return replace(
        inspection,
        tokenizer=manifest.tokenizer_name,
        text_bytes=None if manifest.duplicates else manifest.text_bytes or None,
        empty=inspection.empty + manifest.empty,
        damaged=damaged,
        unchecked=list_unchecked_files(manifest),
    )


def inspect_store(store: TokenStore, tokenizer: Tokenizer | None, samples: int = 0) -> Inspection:
    """Inspect a token store without verifying checksums.

    Args:
        store: the tokens.
        tokenizer: decodes the samples; None gives no samples.
        samples: the number of documents to decode.

    Raises:
        DataError: the store holds no documents.
    """
    if not store.num_documents:
        raise DataError(f"{store.place}: holds no documents")
    lengths = np.maximum(np.diff(store.offsets) - 1, 0)
    levels = {"shortest": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
    quantiles = np.quantile(lengths, list(levels.values()), method="nearest")
    return Inspection(
        place=store.place,
        tokens=store.num_tokens,
        documents=store.num_documents,
        learned_tokens=(
            store.num_tokens if store.loss_mask is None else int(np.count_nonzero(store.loss_mask))
        ),
        empty=int((lengths == 0).sum()),
        skipped=store.skipped,
        faults=[str(fault) for fault in store.faults],
        text_bytes=None,
        tokenizer="",
        mean_length=float(lengths.mean()),
        quantiles=dict(zip(levels, quantiles.tolist(), strict=True)),
        histogram=length_histogram(lengths),
        duplicates=find_duplicates(store, lengths),
        damaged=[],
        unchecked=[],
        samples=_decode_samples(store, tokenizer, samples) if tokenizer else {},
        loss_samples=_decode_loss_samples(store, tokenizer, samples) if tokenizer else {},
    )


def length_histogram(lengths: NDArray[np.int64]) -> list[LengthBin]:
    """Count documents in bins of doubling length: 0, 1, 2 to 3, 4 to 7 and so on."""
    power_of = np.frexp(lengths.astype(np.float64))[1]  # 0, then 1, 2..3, 4..7, ...
    counts = np.bincount(power_of)
    first = int(np.flatnonzero(counts)[0])
    return [
        LengthBin(2 ** (power - 1) if power else 0, 2**power - 1, int(counts[power]))
        for power in range(first, len(counts))
    ]


def find_duplicates(store: TokenStore, lengths: NDArray[np.int64]) -> Duplicates:
    """Count duplicates by a 128-bit hash of each document's tokens; empty documents are left out.

    Args:
        store: the tokens.
        lengths: tokens of each document without the end-of-document token, [documents].
    """
    numbers = np.flatnonzero(lengths)
    if not numbers.size:
        return Duplicates(0, 0, 0, 0)
    tokens, starts = store.tokens, store.offsets[numbers]
    stops = starts + lengths[numbers]
    digests = b"".join(
        xxh3_128_digest(tokens[start:stop].data)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    )
    halves = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort(halves.T)  # stable: the first of equals comes first
    ordered = halves[order]
    begins = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))
    runs = np.diff(np.append(np.flatnonzero(begins), len(order)))
    longest = int(runs.argmax())
    repeated = numbers[order[~begins]]
    return Duplicates(
        documents=len(repeated),
        tokens=int(lengths[repeated].sum()),
        most_frequent=int(numbers[order[np.flatnonzero(begins)[longest]]]),
        times=int(runs[longest]),
    )


def _choose_samples(store: TokenStore, count: int) -> list[int]:
    spread = np.linspace(0, store.num_documents - 1, count)
    numbers: list[int] = np.unique(spread.round().astype(int)).tolist()
    return numbers


def _decode_loss_samples(
    store: TokenStore, tokenizer: Tokenizer, count: int
) -> dict[int, list[LossPiece]]:
    """Decode beginnings of documents with special tokens, in runs of one loss mask each."""
    if store.loss_mask is None:
        return {}
    decode = tokenizer.decode
    if isinstance(tokenizer, SpecialTokenDecoder):
        decode = tokenizer.decode_with_special
    pieces = {}
    for number in _choose_samples(store, count):
        start, stop = store.offsets[number], store.offsets[number + 1]
        stop = min(stop, start + SAMPLE_TOKENS)
        tokens, mask = store.tokens[start:stop], np.asarray(store.loss_mask[start:stop], dtype=bool)
        borders = np.flatnonzero(np.diff(mask)) + 1
        runs = zip(np.split(tokens, borders), np.split(mask, borders), strict=True)
        pieces[number] = [
            LossPiece(decode(run.tolist()), bool(of[0])) for run, of in runs if len(run)
        ]
    return pieces


def _decode_samples(store: TokenStore, tokenizer: Tokenizer, count: int) -> dict[int, str]:
    """Decode the beginnings of documents at equal distances over the corpus, by document index."""
    numbers = _choose_samples(store, count)
    starts, stops = store.offsets[numbers], store.offsets[[number + 1 for number in numbers]] - 1
    stops = np.minimum(stops, starts + SAMPLE_TOKENS)
    return {
        number: tokenizer.decode(store.tokens[start:stop].tolist())
        for number, start, stop in zip(numbers, starts.tolist(), stops.tolist(), strict=True)
    }
