"""Documents become tokens, some thousands at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from ..core import faults
from ..core.errors import DataError
from ..sources.documents import Document, DocumentFault, text_of
from ..tokenizers.marked_text import MarkedText
from ..tokenizers.tokenizer import Tokenizer
from .columns import Chunk, make_chunk
from .manifest import Tally

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
