"""Leaves out documents that a corpus has already, in the order of the documents."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from xxhash import xxh3_128_digest

from ...core.errors import RecipeError
from ...tokenizers.tokenizer import Ids
from ..tokenise import Chunk

NEAR = 0.8
"""the share of equal runs of tokens from which documents are near duplicates"""


class DuplicateFilter:
    """Leaves out documents with exactly the same tokens as one before them.

    It holds a hash of 128 bits of each document, about 90 bytes in all.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def drop(self, chunk: Chunk) -> Chunk:
        """Return a chunk without documents that are in it, or in chunks before it, already."""
        stops = np.cumsum(chunk.lengths)
        bounds = zip((stops - chunk.lengths).tolist(), stops.tolist(), strict=True)
        is_new = [self.is_new(chunk.tokens[start:stop]) for start, stop in bounds]
        if all(is_new):
            return chunk
        keep = np.array(is_new, dtype=bool)
        tokens = np.repeat(keep, chunk.lengths)
        return Chunk(
            chunk.tokens[tokens],
            chunk.lengths[keep],
            None if chunk.loss_mask is None else chunk.loss_mask[tokens],
            replace(chunk.tally, duplicates=chunk.tally.duplicates + is_new.count(False)),
        )

    def is_new(self, tokens: Ids) -> bool:
        """Return whether a document is no duplicate of one before it, and remember it."""
        digest = xxh3_128_digest(np.ascontiguousarray(tokens).data)
        is_new = digest not in self._seen
        self._seen.add(digest)
        return is_new


def parse_dedup(text: str) -> str:
    """Return how duplicates are found: "" (not), "exact", or "near:" and a share.

    Raises:
        RecipeError: the text is none of these.
    """
    if text in ("", "exact"):
        return text
    match = re.fullmatch(r"near(:(0?\.\d+|1|1\.0+))?", text, re.ASCII)
    share = float(match[2] or NEAR) if match else 0.0
    if not 0 < share <= 1:
        hint = f"a share from 0 to 1 follows near, such as near:{NEAR}"
        raise RecipeError(f"--dedup {text}: expected exact, near or near:SHARE", hint)
    return f"near:{share}"
