"""The numbers that are told of pairs of answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels.choose import Kernels
from ....kernels.summation import widen
from .batch import PairBatch
from .criteria import Scores


class PairNumbers:
    """The numbers that are told of scored pairs.

    Args:
        batch: the pairs.
        kernels: the implementations of this rank.
    """

    def __init__(self, batch: PairBatch, kernels: Kernels) -> None:
        self._batch = batch
        self._kernels = kernels
        self._told: Tensor | None = None

    def keep(self, scores: Scores, point: Tensor | None = None) -> Tensor:
        """Keep the numbers of scored pairs, and return the sum of the losses.

        Args:
            scores: losses and rewards.
            point: [B], what rewards were compared with; None: nothing.
        """
        correct = (scores.chosen > scores.rejected).to(scores.chosen.dtype)
        told = [scores.losses, scores.chosen, scores.rejected, correct]
        told.append(torch.zeros_like(correct) if point is None else point)
        sums = torch.stack(told).where(self._batch.valid_pairs, 0).sum(1)
        self._told = sums.detach()
        # FSDP warns of outputs that are views.
        return sums[0].clone()

    def sums(self) -> Tensor:
        """Return the sum that is minimised, then loss, rewards, correct pairs, reference points."""
        assert self._told is not None, "the head was called"
        # One of the ranks that share a sequence tells the numbers of the whole.
        return torch.cat([self._told[:1], self._told]) * self._kernels.sequence.is_first


def name_scores(
    scores: Tensor, batch: PairBatch, key: str, tokens: Tensor | None = None
) -> list[dict[str, Any]]:
    """Return the scores of both answers of each pair, and of single answers.

    Args:
        scores: of each row.
        batch: the rows.
        key: what the score of a single answer is called.
        tokens: of each row how many tokens the answer has; None: they are not told.
    """
    singles = [False] * len(scores) if batch.is_single is None else batch.is_single.tolist()
    counts = [{}] * len(scores) if tokens is None else [{"tokens": n} for n in tokens.tolist()]
    rows = zip(widen(scores).tolist(), singles, counts, strict=True)
    # A row that is not single is chosen, and the next one is the rejected answer.
    return [
        {key: score, **count} if single else {"chosen": score, "rejected": next(rows)[0]}
        for score, single, count in rows
    ]
