"""Divides the documents of a source over clients: each document belongs to one client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from ...corpus.cache import open_or_make
from ...corpus.store import StoreWriter, TokenStore
from ...corpus.tokenise import Chunk, Tally
from ...tokenizers.tokenizer import Tokenizer

CHUNK_TOKENS = 2**20
"""tokens that are copied at a time"""


def draw_shares(clients: int, sources: int, alpha: float, seed: int) -> NDArray[np.float64]:
    """Return each client's share of the documents of each source, [sources, clients].

    Source: Hsu et al. 2019, arXiv:1909.06335, with sources in the place of classes.

    Args:
        clients: number of clients.
        sources: number of sources.
        alpha: concentration: small values give a source to few clients, large ones to all alike.
        seed: other seeds draw other shares.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, 2**32]))
    return random.dirichlet([alpha] * clients, size=sources)


def assign_documents(store: TokenStore, stop: int, shares: Sequence[float]) -> NDArray[np.int64]:
    """Return the number of the client of each document, [documents].

    It follows from the document's tokens alone, so that copies of a document are at one client, and
    neither other documents nor their order matter.

    Args:
        store: the documents.
        stop: the token at which what is held out begins; documents from there on belong to none.
        shares: share of each client, which add up to 1.
    """
    borders = np.asarray(store.offsets)
    count = int(np.searchsorted(borders, stop, side="right")) - 1
    hashes = np.fromiter(
        (
            # In one dtype, whatever the store has: a document is the same in all of them.
            xxh3_64_intdigest(store.tokens[start:end].astype("<u4").tobytes())
            for start, end in pairwise(borders[: count + 1])
        ),
        dtype=np.uint64,
        count=count,
    )
    ends = np.cumsum(shares)
    places = np.searchsorted(ends, hashes / 2.0**64 * ends[-1], side="right")
    client: NDArray[np.int64] = np.minimum(places, len(shares) - 1)
    return client


class DocumentShares:
    """Opens a client's documents of the sources of a recipe, copied once into the cache.

    Args:
        shares: share of each client, by the label of the source.
        tokenizer: the recipe's tokenizer.
        cache: the folder of tokenised sources.
    """

    def __init__(
        self, shares: Mapping[str, Sequence[float]], tokenizer: Tokenizer, cache: Path
    ) -> None:
        self._shares = shares
        self._tokenizer = tokenizer
        self._cache = cache
        self._assigned: dict[str, NDArray[np.int64]] = {}

    def share_of(self, label: str, client: int) -> float:
        """Return a client's share of a source."""
        return self._shares[label][client]

    def select(self, store: TokenStore, stop: int, label: str, client: int) -> TokenStore | None:
        """Return a client's documents of a store; None: it has none.

        Args:
            store: the documents of a source.
            stop: the token at which what is held out begins.
            label: label of the source.
            client: number of the client.
        """
        shares = self._shares[label]
        key = xxh3_128_hexdigest(f"{store.fingerprint} {stop} {list(shares)}".encode())
        if key not in self._assigned:
            self._assigned[key] = assign_documents(store, stop, shares)
        mine = np.flatnonzero(self._assigned[key] == client)
        if not len(mine):
            return None
        name = xxh3_128_hexdigest(f"{key} {client}".encode())
        folder = self._cache / f"client-{name}"
        open_store = partial(TokenStore.open, folder, self._tokenizer)
        make = partial(self._write, folder, store, mine)
        return open_or_make(folder, open_store, make, store.place)

    def _write(self, folder: Path, store: TokenStore, documents: NDArray[np.int64]) -> None:
        lengths = np.diff(store.offsets)[documents]
        chunks = np.cumsum(lengths) // CHUNK_TOKENS
        with StoreWriter(folder, self._tokenizer) as writer:
            for group in np.split(documents, np.flatnonzero(np.diff(chunks)) + 1):
                places = [slice(*store.offsets[each : each + 2]) for each in group]
                mask = store.loss_mask
                writer.write(
                    Chunk(
                        np.concatenate([store.tokens[place] for place in places]),
                        np.diff(store.offsets)[group],
                        None if mask is None else np.concatenate([mask[each] for each in places]),
                        Tally(),
                    )
                )
            writer.finish()
