"""A micro batch of rows, and the bytes of text that its labels stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..tokenizers.tokenizer import Tokenizer

IGNORED = -100
"""the label of a position that does not count in the loss"""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64; the token that follows, or -100 where none counts in the loss.
        positions: [B, S] int64, from the start of each document; None: from the row's start.
        document_ids: [B, S] int32, within the row; attention stays inside a document.
            None: a row is one document.
        sources: [B] int64, from which source each row is; None: all are from one.
        padding_mask: [B, S] bool; True at filler, which belongs to no document. A token without a
            label, such as a prompt's, is no filler. None: there is none.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    sources: Tensor | None = None
    padding_mask: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device; to a GPU through pinned memory, without waiting."""
        if device.type == "cuda":
            # From pageable memory the host would wait for the copy. torch keeps the pinned memory
            # until the copy has ended.
            return self._each(lambda column: column.pin_memory().to(device, non_blocking=True))
        return self._each(lambda column: column.to(device))

    def split(self, size: int) -> Iterator[Batch]:
        """Yield views of `size` rows each; the last may have fewer."""
        if len(self.tokens) <= size:
            yield self
            return
        for first in range(0, len(self.tokens), size):
            yield self._each(itemgetter(slice(first, first + size)))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        columns: list[Tensor | None] = [getattr(self, column.name) for column in fields(self)]
        changed: Any = [None if column is None else change(column) for column in columns]
        return Batch(*changed)


def count_label_bytes(batches: Iterable[Batch], tokenizer: Tokenizer) -> int | None:
    """Return how many bytes of text the labels that count in the loss stand for.

    None if the tokenizer has no table of them, `token_bytes`.
    """
    table = getattr(tokenizer, "token_bytes", None)  # plugins may lack it
    if table is None:
        return None
    labels = (batch.labels.numpy() for batch in batches)
    return sum(int(table[row[row != IGNORED]].sum()) for row in labels)
