"""Which tokens of a source are held out for validation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..corpus.store import TokenStore
from ..sources.configs import SourceConfig


def find_borders(
    source: SourceConfig, stores: Sequence[TokenStore], fraction: float, longest: int
) -> list[int]:
    """Return the token of each store at which what is validated on begins."""
    if source.split == "validation":
        return [0] * len(stores)
    if not fraction:
        return [store.num_tokens for store in stores]
    return [split_point(store, fraction, longest) for store in stores]


def split_point(store: TokenStore, fraction: float, seq_len: int) -> int:
    """Return the token at which the held-out tail begins; the last if a row does not fit in it.

    The nearest document border is taken if it changes the length of the tail by less than half.
    """
    row = seq_len + 1
    tail = max(round(store.num_tokens * fraction), row)
    if tail + row > store.num_tokens:
        return store.num_tokens
    target = store.num_tokens - tail
    after = int(np.searchsorted(store.offsets, target))
    # The two borders around the target: a document is then not in training and validation both.
    borders = [int(border) for border in store.offsets[max(after - 1, 0) : after + 1]]
    nearest = min(borders, key=lambda border: abs(border - target))
    is_close = row <= nearest <= store.num_tokens - row and abs(nearest - target) <= tail // 2
    return nearest if is_close else target
