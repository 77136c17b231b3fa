"""Which queries of a rank see which keys of another, where each holds two pieces of a sequence.

See `ContextParallel` for the pieces. All of it is known before anything is computed, so that what
no query sees costs nothing, and masks are made only where they hide something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_ROWS = 64
"""shorter products are not worth what they leave out"""
MOST_BLOCKS = 8
"""blocks of a piece's queries: more would be many small products"""


class AttentionPart(NamedTuple):
    """Queries and keys that one kernel call takes.

    Attributes:
        rows: the queries, among this rank's positions.
        keys: the keys, among the positions of the rank that holds them.
        mask: [B or 1, 1, queries, keys], True where a query sees a key; None: see `is_causal`.
        is_causal: whether each query sees the keys up to its own; else, without a mask, all.
        is_first: whether these are the first keys of these queries: each sees its own at least.
    """

    rows: slice
    keys: slice
    mask: Tensor | None
    is_causal: bool
    is_first: bool


@dataclass(frozen=True)
class Pieces:
    """How a sequence is divided, and how far back its positions see.

    Attributes:
        ranks: number of ranks C that share the sequence; rank r holds pieces r and 2C - 1 - r.
        length: number of positions of a piece.
        window: see `kernels.attention.local.attend`.
        chunk: see there.
    """

    ranks: int
    length: int
    window: int | None = None
    chunk: int | None = None

    def parts(
        self, mine: int, source: int, query: Tensor, documents: Tensor | None
    ) -> Iterator[AttentionPart]:
        """Yield the work of rank `mine`'s queries with rank `source`'s keys.

        Args:
            mine: the rank of the queries.
            source: the rank of the keys.
            query: the queries, [B, S, ...]; masks are made for these rows and this device.
            documents: document of each position of the C ranks, [B, C, S]; None: each row is one.
        """
        if self.window or self.chunk:
            yield from self._within_reach(mine, source, query, documents)
            return
        first, second, both = slice(self.length), slice(self.length, None), slice(None)
        is_own, found = source == mine, [(both, both)]
        if source < mine:
            found = [(both, first)]
        elif source > mine:
            found = [(second, both)]
        elif documents is not None:
            # Kernels take no causal flag beside a mask, so that one square of later keys is left
            # out here.
            found = [(first, first), (second, both)]
        for rows, keys in found:
            mask = None
            if documents is not None:
                mask = _same_document(documents, mine, source, rows, keys)
                mask = mask.tril(mask.shape[3] - mask.shape[2]) if is_own else mask
            yield AttentionPart(rows, keys, mask, is_own and mask is None, is_own)

    def _within_reach(
        self, mine: int, source: int, query: Tensor, documents: Tensor | None
    ) -> Iterator[AttentionPart]:
        """Yield blocks of queries, each with the keys that some of them reach."""
        length = self.length
        step = max(min(self.window or length, self.chunk or length), LEAST_ROWS)
        step = max(step, -(-length // MOST_BLOCKS))
        for at, number in enumerate(self._numbers(mine)):
            # A query's own piece of keys comes first: it holds the query's own key.
            held = sorted(enumerate(self._numbers(source)), key=lambda each: each[1] != number)
            end = (number + 1) * length
            for first in range(number * length, end, step):
                for place, other in held:
                    start = max(self._first_key(first), other * length)
                    stop = min(first + step, end, (other + 1) * length)
                    if start >= stop:
                        continue
                    last = min(first + step, end, self._last_query(stop - 1) + 1)
                    # Positions of the sequence become places among those that a rank holds.
                    to_row, to_key = (at - number) * length, (place - other) * length
                    rows = slice(first + to_row, last + to_row)
                    keys = slice(start + to_key, stop + to_key)
                    reaches_all = self._first_key(last - 1) <= start and documents is None
                    is_causal = reaches_all and (start, stop) == (first, last)
                    mask = None
                    if not is_causal and not (reaches_all and stop <= first + 1):
                        mask = self._mask(first, last, start, stop, query)
                        if documents is not None:
                            mask = mask & _same_document(documents, mine, source, rows, keys)
                    yield AttentionPart(rows, keys, mask, is_causal, other == number)

    def _numbers(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the pieces that a rank holds."""
        return rank, 2 * self.ranks - 1 - rank

    def _first_key(self, query: int) -> int:
        """Return the first position that a query at a position sees."""
        start = query // self.chunk * self.chunk if self.chunk else 0
        return max(start, query - self.window + 1) if self.window else start

    def _last_query(self, key: int) -> int:
        """Return the last position that sees a key at a position."""
        stop = 2 * self.ranks * self.length
        stop = min(stop, (key // self.chunk + 1) * self.chunk) if self.chunk else stop
        return min(stop, key + self.window) - 1 if self.window else stop - 1

    def _mask(self, first: int, last: int, start: int, stop: int, like: Tensor) -> Tensor:
        """Return which of some positions see which, [B, 1, queries, keys]."""
        query = torch.arange(first, last, device=like.device).unsqueeze(1)
        key = torch.arange(start, stop, device=like.device)
        seen = key <= query
        if self.window:
            seen &= query - key < self.window
        if self.chunk:
            seen &= query // self.chunk == key // self.chunk
        return seen.expand(len(like), 1, -1, -1)


def _same_document(documents: Tensor, mine: int, source: int, rows: slice, keys: slice) -> Tensor:
    """Return [B, 1, queries, keys], True where a query and a key are of one document."""
    same = documents[:, mine, rows].unsqueeze(2) == documents[:, source, keys].unsqueeze(1)
    return same.unsqueeze(1)
