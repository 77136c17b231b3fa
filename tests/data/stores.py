"""Small token stores made in memory."""

import numpy as np

from trainer.engine.data.store import TokenStore

EOS = 0


def store_of(lengths: list[int], start: int = 1) -> TokenStore:
    """Documents of these lengths; every token but eos is another number."""
    tokens, offsets = [], [0]
    for length in lengths:
        tokens += [*range(start, start + length), EOS]
        start += length
        offsets.append(len(tokens))
    return TokenStore(
        tokens=np.array(tokens, dtype=np.uint32),
        offsets=np.array(offsets, dtype=np.int64),
        eos_id=EOS,
        fingerprint=str(lengths),
    )


def random_lengths(count: int, mean: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).geometric(1 / mean, count).tolist()
