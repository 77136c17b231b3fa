"""Scores the log-probability of each token of a text without storing all logits."""

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
    """A row of inputs and labels.

    Attributes:
        inputs: token ids, [S].
        labels: the token after each input, [S]; `IGNORED` where the input only gives context.
        document: the caller's number of the document that the row belongs to.
    """

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]
    document: int


def windows(
    tokens: NDArray[np.int64],
    seq_len: int,
    stride: int,
    *,
    counted: NDArray[np.bool_] | None = None,
    document: int = 0,
) -> Iterator[ScoredWindow]:
    """Yield rows of at most `seq_len` inputs that predict every token but the first.

    The first row predicts `seq_len` tokens. Each later row predicts the next `stride` tokens, with
    as much context before them as fits into the row.

    Args:
        tokens: token ids, [T]; the first is context only.
        seq_len: the largest number of inputs in a row.
        stride: the number of tokens that each row but the first predicts, 1 to `seq_len`.
        counted: the mask of scored tokens, [T]; None scores all but the first.
        document: the number of the document, stored in each window.
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
    """The score of the labels of one row that are not ignored."""

    nll: float
    """sum of the labels' negative log-probabilities, in nats"""
    num_tokens: int
    is_greedy: bool
    """whether every label was the likeliest token"""


class TokenScores:
    """A loss function for `LanguageModel.forward` that stores the loss of each label.

    Attributes:
        nll: negative log-probability of each label, [T] in fp32; 0 for ignored labels.
        is_greedy: whether each label was the likeliest token, [T]; True for ignored labels.
    """

    nll: Tensor
    is_greedy: Tensor

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over the labels that are not ignored.

        Args:
            hidden: hidden states, [T, D].
            weight: the output projection, [V, D].
            labels: the next token of each position, [T], or `IGNORED`.
        """
        places = torch.nonzero(labels != IGNORED).squeeze(1)
        self.nll = torch.zeros(len(labels), device=labels.device)
        self.is_greedy = torch.ones_like(labels, dtype=torch.bool)
        weight = weight.to(hidden.dtype)
        # A few rows at a time: all logits, [T, V] in fp32, may not fit in memory.
        for some in torch.split(places, max(1, MAX_LOGITS // len(weight))):
            logits, wanted = F.linear(hidden[some], weight).float(), labels[some]
            self.nll[some] = F.cross_entropy(logits, wanted, reduction="none")
            self.is_greedy[some] = logits.argmax(-1) == wanted
        return self.nll.sum()


@torch.inference_mode()
def score_batch(model: LanguageModel, batch: Batch) -> list[Score]:
    """Run the model on a batch and return the score of each row."""
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
    """Yield each row with its score, in another order than the rows came.

    Rows are sorted by length within groups of `SORTED_BATCHES` batches, which saves padding.
    """
    waiting = iter(rows)
    while some := list(islice(waiting, batch_size * SORTED_BATCHES)):
        some.sort(key=lambda row: -len(row.inputs))
        for first in range(0, len(some), batch_size):
            batch = some[first : first + batch_size]
            yield from zip(batch, score_batch(model, _pad_rows(batch)), strict=True)


def _pad_rows(rows: Sequence[ScoredWindow]) -> Batch:
    """Pad rows at the right to a batch; causal attention keeps tokens from seeing the padding."""
    shape = len(rows), max(len(row.inputs) for row in rows)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    padding_mask = np.ones(shape, np.bool_)
    for number, row in enumerate(rows):
        padding_mask[number, : len(row.inputs)] = False
        tokens[number, : len(row.inputs)] = row.inputs
        labels[number, : len(row.labels)] = row.labels
    padding = torch.from_numpy(padding_mask)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), padding_mask=padding)
