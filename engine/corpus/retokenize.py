"""Decodes a folder of tokens to text with the tokenizer that is stored beside the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import PrivateAttr, ValidationError
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, nearest
from ..sources.configs import DocumentSource
from ..sources.documents import Document, DocumentFault
from ..tokenizers.byte_tokenizer import begin_text
from ..tokenizers.configs import tokenizers
from ..tokenizers.tokenizer import Tokenizer
from .cache import default_cache
from .checksums import require_intact
from .manifest import TOKENIZER_FOLDER, read_manifest
from .store import TokenStore

PART_TOKENS = 2**24
BATCH_DOCUMENTS = 1024


class StoredDocuments(DocumentSource):
    """A source of the decoded documents of a folder of tokens.

    A document whose text does not encode to the same tokens is a fault: tokenising lost text, or
    the document holds the text of special tokens.
    """

    name: Literal["tokens"] = "tokens"
    path: str
    """the folder with `tokens.json`"""
    _store: TokenStore = PrivateAttr()
    _tokenizer: Tokenizer = PrivateAttr()

    @classmethod
    def of(cls, folder: Path, on_error: str) -> Self:
        """Open a folder of tokens.

        Raises:
            DataError: the folder is damaged, lacks the tokenizer, or has loss masks.
        """
        source = cls.model_validate({"path": str(folder), "on_error": on_error})
        source._store = TokenStore.open(folder, None)
        require_intact(folder, default_cache())
        source._tokenizer = load_bundled_tokenizer(folder)
        if source._store.loss_mask is not None:
            raise DataError(
                f"{folder}: has loss masks, which text cannot hold",
                "prepare the conversations again with the other tokenizer",
            )
        return source

    def parts(self) -> Sequence[Any]:
        """Return ranges of documents of about `PART_TOKENS` tokens, as (first, stop)."""
        offsets = self._store.offsets
        targets = np.arange(0, self._store.num_tokens, PART_TOKENS)
        starts = np.unique(np.searchsorted(offsets[:-1], targets))
        return list(zip(starts.tolist(), [*starts[1:].tolist(), len(offsets) - 1], strict=True))

    def read(self, part: Any) -> Iterator[Document]:
        """Yield the text of each document of a range."""
        store, (first, stop) = self._store, part
        for start in range(first, stop, BATCH_DOCUMENTS):
            numbers = range(start, min(start + BATCH_DOCUMENTS, stop))
            # Without the eos token that follows each document.
            documents = [store.tokens[store.offsets[n] : store.offsets[n + 1] - 1] for n in numbers]
            texts = [self._tokenizer.decode(ids.tolist()) for ids in documents]
            encoded = self._tokenizer.encode_batch(texts)
            for number, ids, text, again in zip(numbers, documents, texts, encoded, strict=True):
                if np.array_equal(ids, begin_text(self._tokenizer, again)):
                    yield text
                else:
                    place = f"{store.place}: document {number}"
                    yield DocumentFault(place, "its text does not give the same tokens again")

    def fingerprint(self) -> str:
        """Return a hash of the tokens and of the documents' offsets."""
        return f"{self._store.fingerprint} {xxh3_128_hexdigest(self._store.offsets.data)}"


def load_bundled_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that made the tokens of a folder.

    Raises:
        DataError: the folder does not name or hold its tokenizer, or holds another one.
    """
    manifest = read_manifest(folder)
    name = manifest.tokenizer_name
    if not name:
        raise DataError(f"{folder}: does not say which tokenizer made it")
    if name not in tokenizers:
        known = nearest(name, tokenizers) or f"known: {', '.join(tokenizers)}"
        raise DataError(
            f"{folder}: made by the tokenizer {name!r}, which no installed package has", known
        )
    config = tokenizers[name]
    values = {"name": name}
    if "path" in config.model_fields:
        values["path"] = str(folder / TOKENIZER_FOLDER)
    try:
        tokenizer = config.model_validate(values).build()
    except ValidationError as error:
        raise DataError(f"{folder}: its tokenizer {name!r} cannot be built: {error}") from error
    if tokenizer.fingerprint != manifest.tokenizer:
        raise DataError(f"{folder / TOKENIZER_FOLDER}: not the tokenizer that made the tokens")
    return tokenizer
