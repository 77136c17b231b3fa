"""Near duplicates by MinHash (Broder 1997), found with the datasketch package."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.hashing import GOLDEN, Words, mix
from ...core.registry import require_package
from ...tokenizers.tokenizer import Ids
from .duplicates import DuplicateFilter

RUN = 5
"""tokens of a run; documents are compared by the sets of their runs"""
PERMUTATIONS, SEED = 128, 1
BATCH = 4096


class NearDuplicateFilter(DuplicateFilter):
    """Leaves out documents whose runs of 5 tokens are mostly those of one that was kept.

    The share of equal runs (Jaccard's index) is estimated by 128 permutations, with an error of
    about 0.04. Candidates are found by locality-sensitive hashing, so that some of those at the
    limit are missed. It holds about 4 KB of each document that was kept.

    Args:
        share: from which share on a document is left out.

    Raises:
        EnvironmentFault: the package is not installed.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        package: Any = require_package("datasketch", "the search for near duplicates", "dedup")
        # One draw of permutations for all documents: to draw them takes longer than to use them.
        self._empty = package.MinHash(PERMUTATIONS, SEED, hashfunc=int)
        # A share of 1 would leave no bands.
        threshold = min(share, 0.98)
        self._index = package.MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._kept: list[NDArray[Any]] = []

    def is_new(self, tokens: Ids) -> bool:
        """Return whether a document is no near duplicate of one that was kept, and remember it."""
        if not super().is_new(tokens):
            return False
        sketch = self._empty.copy()
        runs = hash_runs(tokens)
        for start in range(0, len(runs), BATCH):
            sketch.update_batch(runs[start : start + BATCH].tolist())
        values = sketch.hashvalues
        found = self._index.query(sketch)
        if any((self._kept[other] == values).mean() >= self._share for other in found):
            return False
        self._index.insert(len(self._kept), sketch, check_duplication=False)
        self._kept.append(values)
        return True


def hash_runs(tokens: Ids) -> Words:
    """Return a hash of 32 bits of each run of 5 tokens, each once; of all of a shorter document.

    Args:
        tokens: a document with the end-of-document token.
    """
    ids = tokens.astype(np.uint64) + np.uint64(1)
    count = min(RUN, len(ids))
    words = np.zeros(len(ids) - count + 1, dtype=np.uint64)
    for place in range(count):
        words = mix(words + ids[place : place + len(words)] * GOLDEN)
    return np.unique(words >> np.uint64(32))


def make_filter(dedup: str) -> DuplicateFilter | None:
    """Return what leaves out duplicates as `parse_dedup` says; None: nothing does.

    Raises:
        EnvironmentFault: near duplicates need a package that is not installed.
    """
    if dedup.startswith("near:"):
        return NearDuplicateFilter(float(dedup.removeprefix("near:")))
    return DuplicateFilter() if dedup else None
