"""Tokenises documents in batches of some thousands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core import faults
from ..core.errors import DataError
from ..sources.documents import Document, DocumentFault, text_of
from ..tokenizers.byte_tokenizer import begin_masked, begin_text
from ..tokenizers.tokenizer import Ids, MaskedDocument, Tokenizer

AnyDocument = TypeVar("AnyDocument", bound=Document)
LossMask = NDArray[np.bool_]
BATCH_CHARACTERS = 2**22
BATCH_DOCUMENTS = 2**12


@dataclass
class Tally:
    """Counts of the documents that were read and left out."""

    text_bytes: int = 0
    """bytes of text that became tokens"""
    empty: int = 0
    """documents left out because they hold nothing"""
    skipped: int = 0
    """documents left out because they cannot be read"""
    faults: list[str | DocumentFault] = field(default_factory=list)
    """the reasons for the first skipped documents"""
    duplicates: int = 0
    """documents left out because the corpus has them already"""

    def add(self, other: Tally, max_faults: int = 20) -> None:
        """Add the counts of later documents.

        Args:
            other: the tally of the later documents.
            max_faults: the largest number of faults to keep.
        """
        self.text_bytes += other.text_bytes
        self.empty += other.empty
        self.skipped += other.skipped
        self.duplicates += other.duplicates
        self.faults += other.faults[: max(max_faults - len(self.faults), 0)]


class Chunk(NamedTuple):
    """The tokens of some documents, and the counts of documents that were left out."""

    tokens: Ids
    """[T]; the concatenated documents, each followed by the eos token"""
    lengths: NDArray[np.int64]
    """[documents]; the number of tokens of each document, eos included"""
    loss_mask: LossMask | None
    """[T]; True for tokens that count in the loss as labels; None: all count"""
    tally: Tally


def tokenise(documents: Iterable[Document], on_error: str, tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Tokenise documents and yield them in chunks.

    Args:
        documents: documents, and faults in place of unreadable ones.
        on_error: "stop" to raise at the first fault, or "skip" to count faults.
        tokenizer: the tokenizer.

    Raises:
        DataError: a document cannot be read and `on_error` is "stop".
    """
    for batch in group_documents(documents):
        unread = [item for item in batch if isinstance(item, DocumentFault)]
        if unread and on_error == "stop":
            raise DataError(
                str(unread[0]), 'repair it, or leave such documents out with on_error = "skip"'
            )
        readable = [item for item in batch if not isinstance(item, DocumentFault)]
        # An empty document has nothing to predict.
        filled = [document for document in readable if text_of(document)]
        tally = Tally(
            text_bytes=sum(map(_count_bytes, filled)),
            empty=len(readable) - len(filled),
            skipped=len(unread),
            faults=[*unread],
        )
        yield _encode(filled, tokenizer, tally)


def _encode(documents: Sequence[str | MaskedDocument], tokenizer: Tokenizer, tally: Tally) -> Chunk:
    faults.point("data.tokenise")
    if not any(isinstance(document, MaskedDocument) for document in documents):
        ids = tokenizer.encode_batch([text_of(document) for document in documents])
        return make_chunk(tokenizer, [begin_text(tokenizer, row) for row in ids], tally=tally)
    masked = [
        MaskedDocument(document, ((0, len(document)),)) if isinstance(document, str) else document
        for document in documents
    ]
    encoded = [begin_masked(tokenizer, *pair) for pair in tokenizer.encode_masked(masked)]
    # The eos token counts in the loss if the end of the text does.
    loss_masks = [
        np.append(mask, any(stop >= len(document.text) for _, stop in document.loss_ranges))
        for document, (_, mask) in zip(masked, encoded, strict=True)
    ]
    return make_chunk(tokenizer, [ids for ids, _ in encoded], loss_masks, tally)


def _count_bytes(document: str | MaskedDocument) -> int:
    text = text_of(document)
    return len(text) if text.isascii() else len(text.encode())


def group_documents(documents: Iterable[AnyDocument]) -> Iterator[list[AnyDocument]]:
    """Group documents into batches that are large enough to encode fast and fit in memory."""
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


def narrowest_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return uint16 if it can hold every id of the vocabulary, else uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def make_chunk(
    tokenizer: Tokenizer,
    documents: Sequence[Ids],
    loss_masks: Sequence[LossMask] | None = None,
    tally: Tally | None = None,
) -> Chunk:
    """Concatenate documents, each followed by the eos token.

    Args:
        tokenizer: the tokenizer of the ids.
        documents: the ids of each document.
        loss_masks: the loss mask of each document, with a value for the eos token; None: all count.
        tally: the counts of the documents that were read and left out; None is zero.

    Raises:
        DataError: an id is outside the tokenizer's vocabulary.
    """
    dtype = narrowest_dtype(tokenizer)
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    flat = np.concatenate([eos[:0], *(part for ids in documents for part in (ids, eos))])
    largest = int(flat.max(initial=0))
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer gave id {largest}; its vocabulary has {tokenizer.vocab_size}"
        )
    return Chunk(
        tokens=flat.astype(dtype, copy=False),
        lengths=np.array([len(ids) + 1 for ids in documents], dtype=np.int64),
        loss_mask=None if loss_masks is None else np.concatenate(loss_masks),
        tally=tally or Tally(),
    )
