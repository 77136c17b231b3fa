"""Generates the tokens of the synthetic source."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError
from ..core.hashing import GOLDEN, mix
from ..tokenizers.tokenizer import Tokenizer
from .store import TokenStore
from .tokenise import narrowest_dtype

MAX_SYNTHETIC_TOKENS = 2**32


def make_synthetic_store(
    num_documents: int, document_tokens: int, seed: int, tokenizer: Tokenizer
) -> TokenStore:
    """Generate documents: arithmetic progressions modulo the vocabulary, one token in 16 random.

    Args:
        num_documents: the number of documents.
        document_tokens: the mean number of tokens a document.
        seed: other seeds give other documents.
        tokenizer: bounds the ids.

    Raises:
        DataError: the tokens would not fit in memory.
    """
    if num_documents * document_tokens > MAX_SYNTHETIC_TOKENS:
        raise DataError(
            f"{num_documents} synthetic documents of {document_tokens} tokens are "
            f"more than {MAX_SYNTHETIC_TOKENS} tokens",
            "lower num_documents or document_tokens",
        )
    ordinary = max(tokenizer.vocab_size - 1, 1)
    key = mix(np.array([seed], dtype=np.uint64))
    document = mix(key + np.arange(num_documents, dtype=np.uint64) * GOLDEN)
    spread = document_tokens // 2
    lengths = document_tokens - spread + (document % np.uint64(2 * spread + 1)).astype(int)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    owner = np.repeat(np.arange(num_documents), lengths + 1)
    position = (np.arange(offsets[-1]) - offsets[owner]).astype(np.uint64)
    noise = mix(mix(document)[owner] + position * GOLDEN)
    start, stride = mix(document ^ GOLDEN) >> np.uint64(32), document % np.uint64(7) + np.uint64(1)
    tokens = (start[owner] + stride[owner] * position) % np.uint64(ordinary)
    tokens = np.where(
        noise % np.uint64(16) == 0, (noise >> np.uint64(32)) % np.uint64(ordinary), tokens
    )
    tokens += tokens >= tokenizer.eos_id  # every id but that of eos
    tokens[offsets[1:] - 1] = tokenizer.eos_id
    tokens = tokens.astype(narrowest_dtype(tokenizer))
    return TokenStore(
        tokens=tokens,
        offsets=offsets,
        eos_id=tokenizer.eos_id,
        fingerprint=xxh3_128_hexdigest(tokens.tobytes()),
        place="synthetic",
    )
