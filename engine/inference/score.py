"""Scores the log-probability of each token of a text without storing all logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...model_zoo.language_model import LanguageModel
from ..data.batch import IGNORED, TokenBatch
from ..tasks.language_modeling.token_scores import TokenScores

SORTED_BATCHES = 32
T = TypeVar("T")


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


@torch.inference_mode()
def score_batch(model: LanguageModel, batch: TokenBatch) -> list[Score]:
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
    assert scores.nll is not None, "the model called it"
    nll = scores.nll.view(shape).double().sum(1).tolist()
    count = (batch.labels != IGNORED).sum(1).tolist()
    greedy = scores.is_greedy.view(shape).all(1).tolist()
    return [Score(*each) for each in zip(nll, count, greedy, strict=True)]


def score_batches(
    model: LanguageModel, batches: Iterable[tuple[T, TokenBatch]]
) -> Iterator[tuple[T, list[Score]]]:
    """Yield what comes with each batch, and the scores of its rows.

    Ranks that share a sharded model call it with the same batches. Each scores some of them, and
    all get all scores, those that one process computes.
    """
    if not dist.is_initialized():
        for key, batch in batches:
            yield key, score_batch(model, batch)
        return
    waiting, rank = iter(batches), dist.get_rank()
    while some := list(islice(waiting, dist.get_world_size())):
        # A rank without a batch of its own computes too: the forward pass has collectives.
        mine = score_batch(model, some[min(rank, len(some) - 1)][1])
        for (key, _), scores in zip(some, gather_objects(mine), strict=False):
            yield key, scores


def gather_objects(mine: T) -> list[T]:
    """Return the objects of all ranks, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def score_windows(
    model: LanguageModel, rows: Iterable[ScoredWindow], batch_size: int
) -> Iterator[tuple[ScoredWindow, Score]]:
    """Yield each row with its score, in another order than the rows came.

    Rows are sorted by length within groups of `SORTED_BATCHES` batches, which saves padding.
    """

    def batches() -> Iterator[tuple[Sequence[ScoredWindow], TokenBatch]]:
        waiting = iter(rows)
        while some := list(islice(waiting, batch_size * SORTED_BATCHES)):
            some.sort(key=lambda row: -len(row.inputs))
            for first in range(0, len(some), batch_size):
                batch = some[first : first + batch_size]
                yield batch, _pad_rows(batch)

    for batch, scores in score_batches(model, batches()):
        yield from zip(batch, scores, strict=True)


def _pad_rows(rows: Sequence[ScoredWindow]) -> TokenBatch:
    """Pad rows at the right to a batch; causal attention keeps tokens from seeing the padding."""
    shape = len(rows), max(len(row.inputs) for row in rows)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    padding_mask = np.ones(shape, np.bool_)
    for number, row in enumerate(rows):
        padding_mask[number, : len(row.inputs)] = False
        tokens[number, : len(row.inputs)] = row.inputs
        labels[number, : len(row.labels)] = row.labels
    padding = torch.from_numpy(padding_mask)
    return TokenBatch(torch.from_numpy(tokens), torch.from_numpy(labels), padding_mask=padding)
