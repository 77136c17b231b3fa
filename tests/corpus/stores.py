"""Small token stores made in memory, and what `tokens.json` says of those on disk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trainer.engine.corpus.store import TokenStore

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


def read_described(folder: Path) -> dict[str, Any]:
    """Return what `tokens.json` says, without its checksum."""
    said: dict[str, Any] = json.loads((folder / "tokens.json").read_text())
    del said["xxh3"]
    return said


def write_described(folder: Path, said: dict[str, Any]) -> None:
    """Write a `tokens.json` whose checksum is right."""
    body = json.dumps(said).encode()[1:]
    line = b'{"xxh3": "%s",\n' % xxhash.xxh3_128_hexdigest(body).encode()
    (folder / "tokens.json").write_bytes(line + body)
