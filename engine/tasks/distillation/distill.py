"""Distillation: a student learns a teacher's distribution of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ....kernels.log_probs.reference import linear_top_k
from ...data.batch import Batch, TokenBatch
from ...observe.numbers import Mean, Number
from ...parallel.axis import ParallelModel
from ..language_modeling.next_token import NextToken, TokenLossRecord, predict_tokens
from ..outputs import OutputRecord, run_frozen
from ..task import LossRecord
from .batch import DistillationBatch
from .criterion import SoftCriterion


@dataclass
class TeacherHead:
    """The weight of the teacher's head, which its forward pass shows and the student's loss uses.

    Attributes:
        weight: [V, E]; None before the first forward pass.
        softcap: what the teacher's logits are capped at; None: they are not.
    """

    weight: Tensor | None = None
    softcap: float | None = None

    def keep(self, weight: Tensor, softcap: float | None) -> None:
        """Save the softcap, and copy the gathered weight in the first forward pass."""
        self.softcap = softcap
        # FSDP frees what it gathers: the copy stays. It is frozen, so that one is enough.
        if self.weight is None:
            self.weight = weight.detach().clone()


class TeacherRecord(OutputRecord):
    """Keeps what a student learns from of the hidden states that a head is called with.

    Args:
        task: distillation.
    """

    def __init__(self, task: Distill) -> None:
        self._task = task
        self.told: dict[str, Tensor] = {}

    def __call__(self, *outputs: Any, softcap: float | None = None) -> Tensor:
        """Keep what [T, E] hidden states and head weight [V, E] say; nothing is minimised."""
        hidden, weight, _ = outputs
        loss = self._task.loss
        if self.told:  # later calls are for tokens farther ahead
            pass
        elif loss.top_k:
            tokens, log_probs = linear_top_k(
                hidden,
                weight,
                loss.top_k,
                temperature=loss.temperature,
                shard=loss.kernels.vocabulary,
                softcap=softcap,
            )
            self.told = {"teacher_tokens": tokens, "teacher_log_probs": log_probs}
        else:
            self.told = {"teacher_hidden": hidden}
            self._task.head.keep(weight.to(hidden.dtype), softcap)
        return torch.zeros((), device=hidden.device)


class DistillationRecord(LossRecord):
    """The loss of a student for one forward pass.

    Args:
        task: distillation.
        batch: the rows; the teacher may see them until the forward pass.
    """

    def __init__(self, task: Distill, batch: DistillationBatch) -> None:
        self._task = task
        self.batch = batch
        self._parts: Tensor | None = None
        self._predictions: tuple[Tensor, Tensor] | None = None

    def __call__(self, *outputs: Any, softcap: float | None = None) -> Tensor:
        """Return the sum that is minimised, from hidden states, head weight and labels."""
        hidden, weight, labels = outputs
        if self._parts is not None:  # tokens farther ahead, which the teacher does not predict
            capped = {} if softcap is None else {"softcap": softcap}
            loss = self._task.loss.kernels.linear_cross_entropy
            further: Tensor = loss(hidden, weight, labels, **capped)
            return further
        softcaps = softcap, self._task.head.softcap
        parts = self._task.compute((hidden, weight), self._teacher, labels, softcaps)
        self._parts = parts.detach()
        if self._task.keeps_predictions:
            vocabulary = self._task.loss.kernels.vocabulary
            self._predictions = predict_tokens(hidden, weight, vocabulary), labels
        soft, hard = self._task.loss.weights
        return soft * parts[0] + hard * parts[1]

    @property
    def _teacher(self) -> tuple[Tensor, Tensor]:
        """What the criterion compares the student with; see `SoftCriterion.compute`."""
        told, head = self.batch, self._task.head.weight
        if told.teacher_tokens is not None and told.teacher_log_probs is not None:
            return told.teacher_tokens.flatten(0, 1), told.teacher_log_probs.flatten(0, 1)
        assert told.teacher_hidden is not None, "the teacher comes first"
        assert head is not None, "the teacher comes first"
        return told.teacher_hidden.flatten(0, 1), head

    def sums(self, minimized: Tensor) -> Tensor:
        """Return the sum that is minimised, the divergence and the cross entropy."""
        assert self._parts is not None, "the head was called"
        return torch.cat([minimized.detach().view(1), self._parts])

    def predictions(self) -> tuple[Tensor, Tensor] | None:
        """Return the student's most probable token at each position, [T], and the labels, [T]."""
        return self._predictions


@dataclass(frozen=True, kw_only=True)
class Distill(NextToken):
    """Learns the distributions of a teacher; the loss is a mean over the labels that count.

    Sums are the minimised loss, the divergence and the cross entropy; counts are the labels.

    Attributes:
        loss: the criterion.
        compute: what computes the losses; see `SoftCriterion.compute`.
        frozen: the teacher; None where the model only computes.
        head: what the teacher's forward pass shows of its head.
        is_precomputed: whether batches come with what the teacher says of them.
    """

    loss: SoftCriterion
    compute: Callable[..., Tensor]
    head: TeacherHead = field(default_factory=TeacherHead)
    is_precomputed: bool = False

    batch_class: ClassVar[type[Batch]] = DistillationBatch

    @property
    def num_sums(self) -> int:
        """The minimised sum, the divergence and the cross entropy."""
        return 3

    def prepare(self, batches: Sequence[TokenBatch], model: ParallelModel) -> Sequence[TokenBatch]:
        """Ask the teacher about batches that go through a pipeline.

        Without a pipeline `forward` does it, and the answers to one micro batch are held at a time.
        """
        if model.pipeline is None:
            return batches
        # Such a batch has all samples of a step: some at a time need less memory.
        return [self._teach(batch, self.data.micro_batch) for batch in batches]

    def _teach(self, batch: TokenBatch, size: int) -> DistillationBatch:
        """Return rows with what the teacher says of them, `size` samples at a time.

        It says nothing on ranks without the last pipeline stage.
        """
        rows = batch if isinstance(batch, DistillationBatch) else DistillationBatch(**vars(batch))
        if rows.is_taught:
            return rows
        told = [self.ask_frozen(piece) for piece in rows.split(size)]
        changes: dict[str, Any] = {name: torch.cat([x[name] for x in told]) for name in told[0]}
        return replace(rows, **changes)

    def ask_frozen(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Return what the teacher says of rows, by the fields of `DistillationBatch`."""
        assert self.frozen is not None, "a step and a validation have a teacher"
        rows = replace(batch, dropout_keys=None)
        record = run_frozen(self.frozen, self, rows, lambda _: TeacherRecord(self))
        shape = batch.tokens.shape
        return {k: told.view(*shape, -1) for k, told in record.told.items()} if record else {}

    def forward(
        self, forward: Callable[..., Tensor], batch: TokenBatch, record: LossRecord
    ) -> Tensor:
        """Run the forward passes of the teacher and of the student."""
        if isinstance(record, DistillationRecord):
            record.batch = self._teach(batch, len(batch))
        return super().forward(forward, batch, record)

    def record(self, batch: TokenBatch) -> LossRecord:
        """Return the criterion for a batch."""
        rows = batch if isinstance(batch, DistillationBatch) else DistillationBatch(**vars(batch))
        if self.frozen is None and not rows.is_taught:
            # The time of a stage is measured without a teacher.
            return TokenLossRecord(self.loss.kernels.linear_cross_entropy)
        return DistillationRecord(self, rows)

    def example(self, rows: int) -> TokenBatch:
        """Return rows of token 0, with what batches from disk have of the teacher."""
        batch = super().example(rows)
        if not self.is_precomputed:
            return batch
        shape = *batch.tokens.shape, self.loss.top_k
        told = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        return DistillationBatch(**vars(batch), teacher_tokens=told[0], teacher_log_probs=told[1])

    def mean_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted mean of divergence and cross entropy over labels."""
        soft, hard = self.loss.weights
        return (soft * sums[1] + hard * sums[2]) / counts[0].clamp(min=1)

    def metrics(self, sums: Tensor, counts: Tensor) -> Mapping[str, Number]:
        """Return the divergence and, where it is minimised, the cross entropy."""
        numbers: dict[str, Number] = {"divergence": Mean(sums[1], counts[0])}
        if self.loss.hard_weight:
            numbers["cross_entropy"] = Mean(sums[2], counts[0])
        return numbers

    def evaluation(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return `loss`, `divergence`, `cross_entropy`, `perplexity` and `bits_per_byte`."""
        soft, hard = self.loss.weights
        # Those of a language model, whose loss is the cross entropy.
        numbers = super().evaluation([sums[0], sums[2]], counts)
        divergence, cross_entropy = sums[1] / max(counts[0], 1), numbers.pop("loss")
        loss = soft * divergence + hard * cross_entropy
        told = {"loss": loss, "divergence": divergence, "cross_entropy": cross_entropy}
        return told | numbers

    def wrap_loss(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the task with a wrapper around the function that computes the loss."""
        return replace(self, compute=wrap(self.compute))

    def with_sources(self, sources: Sequence[str]) -> Self:  # none is told apart
        """Return the task as it is: losses are not told by source."""
        return self
