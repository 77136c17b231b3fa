"""A text that is longer than a row, cut so that each token is predicted exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..data.batch import IGNORED


class ScoredWindow(NamedTuple):
    """One row: inputs, and the token that follows each, or -100 where it only is context."""

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]
    document: int
    """whose it is"""


def windows(
    tokens: NDArray[np.int64],
    seq_len: int,
    stride: int,
    *,
    counted: NDArray[np.bool_] | None = None,
    document: int = 0,
) -> Iterator[ScoredWindow]:
    """Yield rows of at most `seq_len` inputs that predict every token but the first.

    The first row predicts `seq_len` tokens, each later one the next `stride` (at least that many
    inputs before its own are context), and as much context as fits comes before them.

    Args:
        tokens: [T], with what the first token to predict follows.
        seq_len: most inputs a row.
        stride: 1..seq_len; tokens predicted by each row but the first.
        counted: [T]; which tokens are scored. Default: all but the first.
        document: goes into each window.
    """
    labels = tokens.copy()
    if counted is not None:
        labels[~counted] = IGNORED
    done, last = 0, len(tokens) - 1
    while done < last:
        stop = min(done + (stride if done else seq_len), last)
        start = max(0, stop - seq_len)
        row = labels[start + 1 : stop + 1].copy()
        row[: done - start] = IGNORED
        yield ScoredWindow(tokens[start:stop], row, document)
        done = stop
