"""Keys and values of earlier positions, for generation."""

from __future__ import annotations

from torch import Tensor


class BlockCache:
    """One block's keys and values: memory for `capacity` positions, taken at first use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._held: tuple[Tensor, Tensor] | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, S, G, K] keys and [B, S, G, W] values and return all so far, S = length."""
        if self._held is None:
            shapes = [(len(x), self.capacity, *x.shape[2:]) for x in (key, value)]
            self._held = key.new_empty(shapes[0]), value.new_empty(shapes[1])
        start, self.length = self.length, self.length + key.shape[1]
        for held, new in zip(self._held, (key, value), strict=True):
            held[:, start : self.length] = new
        keys, values = self._held
        return keys[:, : self.length], values[:, : self.length]


class KVCache:
    """What a model remembers of the positions it has seen.

    Args:
        capacity: positions that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._blocks: dict[int, BlockCache] = {}
        self._document_ids: Tensor | None = None

    def block(self, number: int) -> BlockCache:
        """Return the part of block `number`."""
        return self._blocks.setdefault(number, BlockCache(self.capacity))

    def extend(self, count: int, document_ids: Tensor | None) -> Tensor | None:
        """Count `count` new positions in, and return the document ids of all, [B, length].

        Document ids are given at every call or at none.
        """
        start, self.length = self.length, self.length + count
        if document_ids is None:
            return None
        if self._document_ids is None:
            self._document_ids = document_ids.new_empty(document_ids.shape[0], self.capacity)
        self._document_ids[:, start : self.length] = document_ids
        return self._document_ids[:, : self.length]
