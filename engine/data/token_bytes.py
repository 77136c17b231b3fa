"""How many bytes of text each token stands for, so that losses of different tokenizers compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .batch import IGNORED

if TYPE_CHECKING:
    from ..tokenizers.tokenizer import Tokenizer
    from .batch import Batch


def count_bytes(batches: Iterable[Batch], tokenizer: Tokenizer) -> int | None:
    """Return how many bytes of text the labels that count stand for.

    None where the tokenizer cannot tell: it has no `token_bytes`, or that is None.
    """
    table = getattr(tokenizer, "token_bytes", None)  # plugins may lack it
    if table is None:
        return None
    labels = (batch.labels.numpy() for batch in batches)
    return sum(int(table[each[each != IGNORED]].sum()) for each in labels)
