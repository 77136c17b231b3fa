"""Preferences: log-probabilities of pairs of answers, and the criteria of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels.choose import Kernels
from ....kernels.log_probs.reference import linear_log_probs
from ....kernels.summation import sum_dtype
from ...data.batch import IGNORED, Batch
from ...observe.numbers import Mean, Number
from ...parallel.axis import ParallelModel
from ..dropout import find_dropout_keys
from ..frozen import FrozenModel, evaluation_mode
from ..metrics.tables import Outputs
from ..outputs import OutputRecord, run_frozen
from ..task import LossRecord, Task
from . import criteria
from .batch import PairBatch, make_example
from .criteria import Answers, Scores
from .pair_numbers import PairNumbers, name_scores

LOSS, CHOSEN, REJECTED, CORRECT, POINT = range(1, 6)
"""places in the sums of a batch; the first one is the sum that is minimised"""


@dataclass(frozen=True)
class PairCriterion:
    """A criterion of pairs of answers.

    Attributes:
        name: "dpo", "ipo", "orpo", "simpo" or "kto".
        keys: the other keys of the recipe's `[loss]`.
        uses_mismatches: whether rewards are compared with a reference point.
        kernels: the implementations of this rank.
    """

    name: str
    keys: Mapping[str, Any]
    uses_mismatches: bool
    kernels: Kernels

    def score(self, chosen: Answers, rejected: Answers, reference_point: Tensor) -> Scores:
        """Return the loss and the rewards of each pair; see `criteria`."""
        if self.name != "kto":
            score: Callable[..., Scores] = getattr(criteria, self.name)
            return score(chosen, rejected, **self.keys)
        both = [
            criteria.kto(
                side, torch.full_like(side.tokens, good).bool(), reference_point, **self.keys
            )
            for side, good in ((chosen, True), (rejected, False))
        ]
        # The mean of the two answers, so that the mean over pairs is that over answers.
        return Scores((both[0][0] + both[1][0]) / 2, both[0][1], both[1][1])


class AnswerRecord(OutputRecord):
    """Keeps the log-probability of each answer.

    Args:
        batch: the answers.
        kernels: the implementations of this rank.
    """

    def __init__(self, batch: PairBatch, kernels: Kernels) -> None:
        self._batch = batch
        self._kernels = kernels
        self.log_probs: Tensor | None = None

    def __call__(self, *outputs: Any, softcap: float | None = None) -> Tensor:
        """Keep [2 B] log-probabilities of whole answers, and return nothing to minimise."""
        hidden, weight, labels = outputs
        if self.log_probs is None:  # later calls are for tokens farther ahead
            vocabulary = self._kernels.vocabulary
            tokens = linear_log_probs(hidden, weight, labels, shard=vocabulary, softcap=softcap)
            # Ranks of the context axis hold parts of each answer.
            self.log_probs = self._kernels.sequence.total(self._batch.sum_rows(tokens))
        return torch.zeros((), device=hidden.device)


class PairRecord(AnswerRecord):
    """The criterion of log-probabilities for one forward pass.

    Args:
        batch: the answers, with what the criterion needs beside the log-probabilities.
        kernels: the implementations of this rank.
        score: computes the criterion; see `PairCriterion.score`.
    """

    def __init__(self, batch: PairBatch, kernels: Kernels, score: Callable[..., Scores]) -> None:
        super().__init__(batch, kernels)
        self._score = score
        self._numbers = PairNumbers(batch, kernels)

    def __call__(self, *outputs: Any, softcap: float | None = None) -> Tensor:
        """Return the sum of the losses, from hidden states, head weight and labels."""
        is_first = self.log_probs is None
        nothing = super().__call__(*outputs, softcap=softcap)
        if not is_first:
            return nothing
        assert self.log_probs is not None, "the call above keeps them"
        batch = self._batch
        counts = batch.sum_rows(batch.labels != IGNORED).to(self.log_probs.dtype)
        tokens = self._kernels.sequence.total(counts)
        # Zeros where nothing is trained, and where the criterion does not ask.
        nothing_known = torch.zeros_like(counts)
        reference = nothing_known if batch.reference is None else batch.reference
        point = nothing_known if batch.reference_point is None else batch.reference_point
        chosen, rejected = (
            Answers(self.log_probs[side::2], tokens[side::2], reference[side::2]) for side in (0, 1)
        )
        return self._numbers.keep(self._score(chosen, rejected, point[::2]), point[::2])

    def sums(self, minimized: Tensor) -> Tensor:
        """Return the sums of the pairs."""
        return self._numbers.sums()


@dataclass(frozen=True, kw_only=True)
class Pairs(Task[PairBatch]):
    """Learns to prefer the chosen answer; the loss is a mean over pairs.

    Sums are those of `PairRecord`; counts are the pairs.

    Attributes:
        loss: the criterion.
        score: what computes it; see `PairCriterion.score`.
        frozen: the reference; None for criteria without one.
        reference_point: the point of a whole validation; None: `prepare` computes that of a step.
    """

    loss: PairCriterion
    score: Callable[..., Scores]
    reference_point: Tensor | None = None

    batch_class: ClassVar[type[Batch]] = PairBatch

    @property
    def num_sums(self) -> int:
        """Those of `PairRecord`."""
        return POINT + 1

    def counts(self, batch: PairBatch) -> Tensor:
        """Count the pairs, on one of the ranks that share sequences."""
        return (batch.valid_pairs.sum() * self.loss.kernels.sequence.is_first).view(1)

    def factors(self, counts: Tensor, scale: float) -> Tensor:
        """Divide by the pairs."""
        return scale / counts[0].clamp(min=1)

    def input(self, batch: PairBatch) -> Tensor:
        """Return the tokens, [2 B, S]."""
        return batch.tokens

    def arguments(self, batch: PairBatch) -> dict[str, Any]:
        """Return positions and, if there are such, padding mask, lengths, and keys of dropout."""
        others = {"padding_mask": batch.padding_mask, "lengths": batch.ragged}
        given = {name: value for name, value in others.items() if value is not None}
        keys = find_dropout_keys(batch.sample_keys, batch.position_of_each, batch.ragged)
        return {"positions": batch.positions, **given, **keys}

    def loss_arguments(self, batch: PairBatch, record: LossRecord) -> dict[str, Any]:
        """Return the labels, which the head passes on."""
        return {"labels": batch.labels, "loss": record}

    def prepare(self, batches: Sequence[PairBatch], model: ParallelModel) -> Sequence[PairBatch]:
        """Add the reference's log-probabilities, and the reference point of the global batch."""
        if self.frozen is None:
            return batches
        if self.loss.uses_mismatches:
            point = self.reference_point
            if point is None:
                point = self._find_reference_point(batches, model, self.frozen)
            batches = [replace(x, reference_point=point.expand(2 * len(x))) for x in batches]
        return [replace(batch, **self.ask_frozen(batch)) for batch in batches]

    def ask_frozen(self, batch: PairBatch) -> dict[str, Any]:
        """Return the reference's log-probability of each answer, by the field of `PairBatch`."""
        assert self.frozen is not None, "the criterion has a reference"
        found = self._log_probs(self.frozen, batch)
        return {} if found is None else {"reference": found}

    def prepare_validation(self, batches: Iterable[PairBatch], model: ParallelModel) -> Self:
        """Return the task with the reference point of all samples of the validation."""
        if self.frozen is None or not self.loss.uses_mismatches:
            return self
        point = self._find_reference_point(batches, model, self.frozen)
        return replace(self, reference_point=point)

    def _find_reference_point(
        self, batches: Iterable[PairBatch], model: ParallelModel, frozen: FrozenModel
    ) -> Tensor:
        trained = FrozenModel(model, frozen.config, evaluation_mode)
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            device = batch.tokens.device
            sums = sums.to(device, sum_dtype(device))
            mismatched = batch.mismatched
            found = [self._log_probs(each, mismatched) for each in (trained, frozen)]
            if found[0] is not None and found[1] is not None:
                valid = batch.valid_pairs.repeat_interleave(2)
                ratios = (found[0] - found[1]).where(valid, 0).sum()
                sums += torch.stack([ratios, valid.sum()])
        # Ranks with the same samples add them several times: the ratio does not change.
        if dist.is_initialized():
            dist.all_reduce(sums)
        return criteria.kto_reference_point(*sums.unbind()).to(torch.get_default_dtype())

    def _log_probs(self, model: FrozenModel, batch: PairBatch) -> Tensor | None:
        """Return [2 B] log-probabilities of answers; None without the last pipeline stage."""
        # A pipeline's batch has all samples of a step: some at a time need less memory.
        records = [
            run_frozen(model, self, piece, lambda part: AnswerRecord(part, self.loss.kernels))
            for piece in batch.split(self.data.micro_batch)
        ]
        found = [record.log_probs for record in records if record and record.log_probs is not None]
        return torch.cat(found) if found else None

    def record(self, batch: PairBatch) -> LossRecord:
        """Return the criterion for a batch."""
        return PairRecord(batch, self.loss.kernels, self.score)

    def output_record(self, batch: PairBatch) -> LossRecord:
        """Return what keeps the log-probability of each answer."""
        return AnswerRecord(batch, self.loss.kernels)

    def predict(
        self, batch: PairBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the log-probabilities of both answers of each pair, and of single answers."""
        assert isinstance(record, AnswerRecord), "output_record returns one"
        assert record.log_probs is not None, "the forward pass came before"
        tokens = (batch.labels != IGNORED).sum(1)
        return name_scores(record.log_probs, batch, "log_prob", tokens)

    def mean_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the mean loss of a pair."""
        return sums[LOSS] / counts[0].clamp(min=1)

    def total_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the mean loss of a pair."""
        return sums[0] / counts[0].clamp(min=1)

    def metrics(self, sums: Tensor, counts: Tensor) -> Mapping[str, Number]:
        """Return mean rewards, their difference, and the share of pairs in the right order."""
        means: dict[str, Number] = {
            "rewards/chosen": Mean(sums[CHOSEN], counts[0]),
            "rewards/rejected": Mean(sums[REJECTED], counts[0]),
            "rewards/margin": Mean(sums[CHOSEN] - sums[REJECTED], counts[0]),
            "accuracy": Mean(sums[CORRECT], counts[0]),
        }
        if self.loss.uses_mismatches:
            means["kl"] = Mean(sums[POINT], counts[0])
        return means

    def evaluation(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return `loss`, `accuracy` and mean rewards."""
        count = max(counts[0], 1)
        numbers = {
            "loss": sums[LOSS] / count,
            "accuracy": sums[CORRECT] / count,
            "rewards/chosen": sums[CHOSEN] / count,
            "rewards/rejected": sums[REJECTED] / count,
            "rewards/margin": (sums[CHOSEN] - sums[REJECTED]) / count,
        }
        return numbers | ({"kl": sums[POINT] / count} if self.loss.uses_mismatches else {})

    def example(self, rows: int) -> PairBatch:
        """Return pairs of token 0, as long as a row."""
        is_ragged = self.data.packing == "ragged"
        mismatches = self.loss.uses_mismatches
        return make_example(rows, self.data.seq_len, with_mismatches=mismatches, ragged=is_ragged)

    @property
    def passes(self) -> float:
        """A step, and a third of one for each forward pass besides.

        The reference has one; the reference point of mismatched answers takes one of each model.
        """
        others = 0 if self.frozen is None else 3 if self.loss.uses_mismatches else 1
        return 1 + others / 3

    def flops_per_unit(self, flops_per_token: float) -> float:
        """Return the FLOPs of a pair: two rows."""
        return 2 * self.data.seq_len * flops_per_token * self.passes

    def wrap_loss(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the task with a wrapper around the function that computes the loss."""
        return replace(self, score=wrap(self.score))

    def with_sources(self, sources: Sequence[str]) -> Self:  # none is told apart
        """Return the task as it is: losses are not told by source."""
        return self
