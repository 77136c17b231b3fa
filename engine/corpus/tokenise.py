"""Documents become tokens, some thousands at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core import faults
from ..core.errors import DataError
from ..sources.documents import Document, DocumentFault, text_of
from ..tokenizers.tokenizer import Ids, MarkedText, Tokenizer

AnyDocument = TypeVar("AnyDocument", bound=Document)
BATCH_CHARACTERS = 2**22
BATCH_DOCUMENTS = 2**12


class Tokenised(NamedTuple):
    """Some documents, read and tokenised."""

    chunk: Chunk | None
    """None: nothing was left of them"""
    tally: Tally


def tokenise(read: Iterable[Document], on_error: str, tokenizer: Tokenizer) -> Iterator[Tokenised]:
    """Yield documents as tokens.

    Raises:
        DataError: a document cannot be read and `on_error` is "stop".
    """
    for batch in batches(read):
        unread = [item for item in batch if isinstance(item, DocumentFault)]
        if unread and on_error == "stop":
            raise DataError(
                str(unread[0]), 'repair it, or leave such documents out with on_error = "skip"'
            )
        documents = [item for item in batch if not isinstance(item, DocumentFault)]
        # An empty document has nothing to predict.
        filled = [item for item in documents if text_of(item)]
        tally = Tally(
            text_bytes=sum(map(_bytes, filled)),
            empty=len(documents) - len(filled),
            skipped=len(unread),
            faults=[*unread],
        )
        yield Tokenised(_encode(filled, tokenizer) if filled else None, tally)


def _encode(documents: list[str | MarkedText], tokenizer: Tokenizer) -> Chunk:
    faults.point("data.tokenise")
    if not any(isinstance(item, MarkedText) for item in documents):
        texts = [item for item in documents if isinstance(item, str)]
        return make_chunk(tokenizer, tokenizer.encode_batch(texts))
    marked = [
        item if isinstance(item, MarkedText) else MarkedText(item, ((0, len(item)),))
        for item in documents
    ]
    encoded = tokenizer.encode_marked(marked)
    learned = [
        np.append(flags, _ends_learned(item))
        for item, (_, flags) in zip(marked, encoded, strict=True)
    ]
    return make_chunk(tokenizer, [ids for ids, _ in encoded], learned)


def _ends_learned(document: MarkedText) -> bool:
    return bool(document.learned) and document.learned[-1][1] >= len(document.text)


def _bytes(document: str | MarkedText) -> int:
    text = text_of(document)
    return len(text) if text.isascii() else len(text.encode())


def batches(documents: Iterable[AnyDocument]) -> Iterator[list[AnyDocument]]:
    """Group documents so that a batch is worth a call and fits in memory."""
    batch: list[AnyDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        if not isinstance(document, DocumentFault):
            characters += len(text_of(document))
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


Learned = NDArray[np.bool_]


class Chunk(NamedTuple):
    """Some documents as tokens."""

    tokens: Ids
    """[T]; the documents end to end, each followed by the eos token"""
    lengths: NDArray[np.int64]
    """[documents]; tokens of each, eos included"""
    learned: Learned | None
    """[T]; None: all"""


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the narrowest type that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def make_chunk(
    tokenizer: Tokenizer, documents: Sequence[Ids], learned: Sequence[Learned] | None = None
) -> Chunk:
    """Put documents end to end, each followed by the eos token.

    Args:
        tokenizer: whose ids they are.
        documents: ids.
        learned: which of them are, the eos token's included.

    Raises:
        DataError: an id is outside the tokenizer's vocabulary.
    """
    dtype = token_type(tokenizer)
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    flat = np.concatenate([part for document in documents for part in (document, eos)])
    largest = int(flat.max())
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer gave id {largest}; its vocabulary has {tokenizer.vocab_size}"
        )
    lengths = np.array([len(document) + 1 for document in documents])
    marks = None if learned is None else np.concatenate(learned)
    return Chunk(flat.astype(dtype, copy=False), lengths, marks)


@dataclass
class Tally:
    """What was met while documents were read."""

    text_bytes: int = 0
    """bytes of text that became tokens"""
    empty: int = 0
    """documents left out because they hold nothing"""
    skipped: int = 0
    """documents left out because they cannot be read"""
    faults: list[str | DocumentFault] = field(default_factory=list)
    """what was wrong with the first of them"""

    def add(self, other: Tally, faults_kept: int = 20) -> None:
        """Count what came after it."""
        self.text_bytes += other.text_bytes
        self.empty += other.empty
        self.skipped += other.skipped
        self.faults += other.faults[: max(faults_kept - len(self.faults), 0)]
