"""The rows of several folders of tokens as those of one source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...corpus.store import TokenStore
from ..order import Indices
from ..packing import Packed, PackedRows


class JoinedRows:
    """The rows of several packed stores, one after the other.

    Args:
        stores: the packed stores in order.
    """

    def __init__(self, stores: Sequence[Packed]) -> None:
        self.stores = stores
        self.ends = np.cumsum([store.num_rows for store in stores])
        self.num_rows = int(self.ends[-1])

    @property
    def store(self) -> TokenStore:
        """The tokens of the first store, which names the source in messages."""
        return self.stores[0].store

    def gather(self, rows: Indices) -> PackedRows:
        """Return the rows of these numbers, [B]."""
        which = np.searchsorted(self.ends, rows, side="right")
        order = np.argsort(which, kind="stable")
        found, starts = np.unique(which[order], return_index=True)
        first = self.ends - [store.num_rows for store in self.stores]
        groups = zip(found, np.split(order, starts[1:]), strict=True)
        parts = [self.stores[i].gather(rows[places] - first[i]) for i, places in groups]
        return PackedRows.concatenate(parts).select(np.argsort(order))


def join_rows(stores: Sequence[Packed]) -> Packed:
    """Return the rows of packed stores as those of one source."""
    return stores[0] if len(stores) == 1 else JoinedRows(stores)
