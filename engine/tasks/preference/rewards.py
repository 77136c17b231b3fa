"""Rewards: a model with one output scores answers, so that the chosen one has the higher score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....kernels.choose import Kernels
from ....kernels.ragged.samples import last_of_sample
from ..metrics.tables import Outputs
from ..outputs import KeptOutputs
from ..task import LossRecord
from .batch import PairBatch
from .criteria import Scores
from .pair_numbers import PairNumbers, name_scores
from .pairs import Pairs


class RewardRecord(LossRecord):
    """The criterion of rewards for one forward pass.

    Args:
        batch: the pairs.
        kernels: the implementations of this rank.
        score: computes losses of chosen and rejected rewards; see `criteria.bradley_terry`.
    """

    def __init__(self, batch: PairBatch, kernels: Kernels, score: Callable[..., Scores]) -> None:
        self._batch = batch
        self._kernels = kernels
        self._score = score
        self._numbers = PairNumbers(batch, kernels)

    def __call__(self, *outputs: Any) -> Tensor:
        """Return the sum of the losses, from one output for each position."""
        (scores,) = outputs
        own = score_rows(scores, self._batch)
        # Of the ranks that share a row, one has the last token.
        rewards = self._kernels.sequence.total(own)
        return self._numbers.keep(self._score(rewards[::2], rewards[1::2]))

    def sums(self, minimized: Tensor) -> Tensor:
        """Return the sums of the pairs."""
        return self._numbers.sums()


def score_rows(scores: Tensor, batch: PairBatch) -> Tensor:
    """Return the output at the last token of each row, [2 B], of [2 B, S, 1] or [1, T, 1]."""
    if batch.ragged:
        return last_of_sample(scores[0, :, 0], batch.ragged)
    return scores.squeeze(-1).where(batch.is_last, 0).sum(1)


@dataclass(frozen=True, kw_only=True)
class Rewards(Pairs):
    """Learns to score answers; the loss is a mean over pairs."""

    def loss_arguments(self, batch: PairBatch, record: LossRecord) -> dict[str, Any]:
        """Return the criterion alone: the head has no labels."""
        return {"loss": record}

    def record(self, batch: PairBatch) -> LossRecord:
        """Return the criterion for a batch."""
        return RewardRecord(batch, self.loss.kernels, self.score)

    def output_record(self, batch: PairBatch) -> LossRecord:
        """Return what keeps the outputs of all positions."""
        return KeptOutputs()

    def predict(
        self, batch: PairBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the scores of both answers of each pair, and of single answers."""
        assert isinstance(record, KeptOutputs), "output_record returns one"
        return name_scores(score_rows(record.outputs, batch), batch, "score")
