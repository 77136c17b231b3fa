"""Score the log-probability of each token of a text, without holding all logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...model_zoo.language_model import LanguageModel
from ..data.batch import IGNORED, Batch

MAX_LOGITS = 2**24
SORTED_BATCHES = 32


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


class Score(NamedTuple):
    """Of the counted labels of one row."""

    nll: float
    """sum of their negative log-probabilities, in nats"""
    num_tokens: int
    is_greedy: bool
    """each was the likeliest"""


class TokenScores:
    """Takes the place of a loss function (see `LanguageModel.forward`) and keeps each label's part.

    Attributes:
        nll: [T] in fp32, 0 where nothing is counted.
        is_greedy: [T] whether the label was the likeliest; true where nothing is counted.
    """

    nll: Tensor
    is_greedy: Tensor

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over the counted labels.

        Args:
            hidden: [T, D].
            weight: [V, D].
            labels: [T].
        """
        places = torch.nonzero(labels != IGNORED).squeeze(1)
        self.nll = torch.zeros(len(labels), device=labels.device)
        self.is_greedy = torch.ones_like(labels, dtype=torch.bool)
        weight = weight.to(hidden.dtype)
        for some in torch.split(places, max(1, MAX_LOGITS // len(weight))):
            logits, wanted = F.linear(hidden[some], weight).float(), labels[some]
            self.nll[some] = F.cross_entropy(logits, wanted, reduction="none")
            self.is_greedy[some] = logits.argmax(-1) == wanted
        return self.nll.sum()


@torch.inference_mode()
def score_batch(model: LanguageModel, batch: Batch) -> list[Score]:
    """Return the score of each row."""
    batch = batch.to(next(model.parameters()).device)
    scores = TokenScores()
    model(
        batch.tokens,
        labels=batch.labels,
        loss=scores,
        positions=batch.positions,
        document_ids=batch.document_ids,
        **({"padding_mask": batch.padding_mask} if model.takes_padding else {}),
    )
    shape = batch.labels.shape
    nll = scores.nll.view(shape).double().sum(1).tolist()
    count = (batch.labels != IGNORED).sum(1).tolist()
    greedy = scores.is_greedy.view(shape).all(1).tolist()
    return [Score(*each) for each in zip(nll, count, greedy, strict=True)]


def score_windows(
    model: LanguageModel, rows: Iterable[ScoredWindow], batch_size: int
) -> Iterator[tuple[ScoredWindow, Score]]:
    """Yield each row with its score; rows of like length are computed together, and reordered."""
    waiting = iter(rows)
    while some := list(islice(waiting, batch_size * SORTED_BATCHES)):
        some.sort(key=lambda row: -len(row.inputs))
        for first in range(0, len(some), batch_size):
            batch = some[first : first + batch_size]
            yield from zip(batch, score_batch(model, _pad_rows(batch)), strict=True)


def _pad_rows(rows: Sequence[ScoredWindow]) -> Batch:
    """Return the rows padded at the right, which no token before it sees."""
    shape = len(rows), max(len(row.inputs) for row in rows)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    padding_mask = np.ones(shape, np.bool_)
    for number, row in enumerate(rows):
        padding_mask[number, : len(row.inputs)] = False
        tokens[number, : len(row.inputs)] = row.inputs
        labels[number, : len(row.labels)] = row.labels
    padding = torch.from_numpy(padding_mask)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), padding_mask=padding)
