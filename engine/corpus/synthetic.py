"""Documents that are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError
from ..core.hashing import GOLDEN, mix
from .store import TokenStore

if TYPE_CHECKING:
    from ..tokenizers.tokenizer import Tokenizer
    from .configs import SyntheticSource

MAX_SYNTHETIC_TOKENS = 2**32


def synthetic_store(source: SyntheticSource, tokenizer: Tokenizer) -> TokenStore:
    """Generate documents: arithmetic progressions modulo the vocabulary, one token in 16 random.

    Raises:
        DataError: it would not fit in memory.
    """
    if source.num_documents * source.document_tokens > MAX_SYNTHETIC_TOKENS:
        raise DataError(
            f"{source.num_documents} synthetic documents of {source.document_tokens} tokens are "
            f"more than {MAX_SYNTHETIC_TOKENS} tokens",
            "lower num_documents or document_tokens",
        )
    ordinary = max(tokenizer.vocab_size - 1, 1)
    seed = mix(np.array([source.seed], dtype=np.uint64))
    document = mix(seed + np.arange(source.num_documents, dtype=np.uint64) * GOLDEN)
    spread = source.document_tokens // 2
    lengths = source.document_tokens - spread + (document % np.uint64(2 * spread + 1)).astype(int)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    owner = np.repeat(np.arange(source.num_documents), lengths + 1)
    place = np.arange(offsets[-1]) - offsets[owner]
    noise = mix(mix(document)[owner] + place.astype(np.uint64) * GOLDEN)
    start, stride = mix(document ^ GOLDEN) >> np.uint64(32), document % np.uint64(7) + np.uint64(1)
    tokens = (start[owner] + stride[owner] * place.astype(np.uint64)) % np.uint64(ordinary)
    tokens = np.where(
        noise % np.uint64(16) == 0, (noise >> np.uint64(32)) % np.uint64(ordinary), tokens
    )
    tokens += tokens >= tokenizer.eos_id  # every id but that of eos
    tokens[offsets[1:] - 1] = tokenizer.eos_id
    tokens = tokens.astype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    return TokenStore(
        tokens=tokens,
        offsets=offsets,
        eos_id=tokenizer.eos_id,
        fingerprint=xxh3_128_hexdigest(tokens.tobytes()),
        place="synthetic",
    )
