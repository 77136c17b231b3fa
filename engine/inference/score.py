"""Scores the log-probability of each token of a text without storing all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...kernels.summation import widen
from ...kernels.vocabulary import WHOLE, VocabularyShard
from ...model_zoo.language_model import LanguageModel
from ..data.batch import IGNORED, TokenBatch
from ..parallel.plan import Plan
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


def gather_objects(mine: T) -> list[T]:
    """Return the objects of all ranks, in the order of ranks; alone, this process's."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@dataclass(frozen=True)
class TextScorer:
    """Scores texts with a language model, on all ranks that share the model together.

    Ranks call the methods with the same texts. Each scores some of them, and all get all scores,
    those that one process computes.

    Attributes:
        model: the module without a wrapper, in evaluation mode. Stages of a pipeline have none.
        plan: how ranks share it.
        vocabulary: the tokens whose logits this rank computes.
        check: called before each forward pass; what it raises ends the work.
    """

    model: LanguageModel
    plan: Plan
    vocabulary: VocabularyShard = WHOLE
    check: Callable[[], None] = lambda: None

    @torch.no_grad()  # what FSDP gathers in inference mode could not be trained with later
    def score_batch(self, batch: TokenBatch) -> list[Score]:
        """Run the model on this rank's part of a batch and return the score of each row."""
        self.check()
        taken = self.plan.take(batch, self.model).to(self.plan.device)
        batch = cast("TokenBatch", taken)
        scores = TokenScores(self.vocabulary)
        given = {"max_documents": batch.max_documents, "padding_mask": batch.padding_mask}
        self.model(
            batch.tokens,
            labels=batch.labels,
            loss=scores,
            positions=batch.positions,
            document_ids=batch.document_ids,
            **{name: value for name, value in given.items() if value is not None},
        )
        shape = batch.labels.shape
        assert scores.nll is not None, "the model called it"
        nll = widen(scores.nll.view(shape)).sum(1).tolist()
        count = (batch.labels != IGNORED).sum(1).tolist()
        greedy = scores.is_greedy.view(shape).all(1).tolist()
        return [Score(*each) for each in zip(nll, count, greedy, strict=True)]

    def score_batches(
        self, batches: Iterable[tuple[T, TokenBatch]]
    ) -> Iterator[tuple[T, list[Score]]]:
        """Yield what comes with each batch, and the scores of its rows."""
        degrees, waiting = self.plan.degrees, iter(batches)
        ranks = [degrees.coordinate(rank) for rank in range(degrees.world)]
        # Ranks of the tensor axis compute the same, those of the context axis parts of each row.
        tells = [(degrees.data_rank(n), n) for n, at in enumerate(ranks) if at.tensor == 0]
        while some := list(islice(waiting, degrees.data)):
            # A rank without a batch of its own computes too: the forward pass has collectives.
            mine = self.score_batch(some[min(self.plan.data_rank, len(some) - 1)][1])
            found = gather_objects(mine) if degrees.world > 1 else [mine]
            for number, (key, _) in enumerate(some):
                parts = [found[rank] for data_rank, rank in tells if data_rank == number]
                rows = (zip(*row, strict=True) for row in zip(*parts, strict=True))
                yield key, [Score(sum(nll), sum(num), all(greedy)) for nll, num, greedy in rows]

    def score_windows(
        self, rows: Iterable[ScoredWindow], batch_size: int
    ) -> Iterator[tuple[ScoredWindow, Score]]:
        """Yield each row with its score, in another order than the rows came.

        Rows are sorted by length within groups of `SORTED_BATCHES` batches, which saves padding.
        """
        pieces = self.plan.degrees.sequence_pieces

        def batches() -> Iterator[tuple[Sequence[ScoredWindow], TokenBatch]]:
            waiting = iter(rows)
            while some := list(islice(waiting, batch_size * SORTED_BATCHES)):
                some.sort(key=lambda row: -len(row.inputs))
                for first in range(0, len(some), batch_size):
                    batch = some[first : first + batch_size]
                    yield batch, _pad_rows(batch, pieces)

        for batch, scores in self.score_batches(batches()):
            yield from zip(batch, scores, strict=True)


def _pad_rows(rows: Sequence[ScoredWindow], pieces: int) -> TokenBatch:
    """Pad rows at the right to a batch; causal attention keeps tokens from seeing the padding.

    Args:
        rows: the rows.
        pieces: divides the length of the batch.
    """
    longest = max(len(row.inputs) for row in rows)
    shape = len(rows), -(-longest // pieces) * pieces
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    padding_mask = np.ones(shape, np.bool_)
    for number, row in enumerate(rows):
        padding_mask[number, : len(row.inputs)] = False
        tokens[number, : len(row.inputs)] = row.inputs
        labels[number, : len(row.labels)] = row.labels
    padding = torch.from_numpy(padding_mask)
    return TokenBatch(torch.from_numpy(tokens), torch.from_numpy(labels), padding_mask=padding)
