"""Distillation: a student learns a teacher's distribution of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ....kernels.choose import Kernels
from ....kernels.divergence.reference import Divergence, linear_divergence
from ...data.batch import IGNORED, Batch, TokenBatch
from ...observe.numbers import Mean, Number
from ...parallel.axis import ParallelModel
from ..language_modeling.next_token import NextToken, TokenLossRecord, predict_tokens
from ..outputs import OutputRecord, run_frozen
from ..task import LossRecord


@dataclass(frozen=True)
class SoftCriterion:
    """The loss of a token: a divergence from the teacher, and the cross entropy with its label.

    Attributes:
        divergence: of the student's distribution from the teacher's.
        temperature: both models' logits are divided by it. The divergence is multiplied by its
            square, so that its gradients keep their size (Hinton et al. 2015, arXiv:1503.02531,
            section 2).
        hard_weight: share of the cross entropy.
        kernels: the implementations of this rank.
    """

    divergence: Divergence
    temperature: float
    hard_weight: float
    kernels: Kernels

    @property
    def weights(self) -> tuple[float, float]:
        """What multiplies the divergence and the cross entropy."""
        return (1 - self.hard_weight) * self.temperature**2, self.hard_weight

    def compute(
        self, student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], labels: Tensor
    ) -> Tensor:
        """Return the summed divergence and the summed cross entropy, [2].

        Args:
            student: hidden states [T, D] and head weight [V, D].
            teacher: hidden states [T, E] and head weight [V, E].
            labels: [T], -100 ignored.
        """
        soft = linear_divergence(
            student,
            teacher,
            labels != IGNORED,
            self.divergence,
            temperature=self.temperature,
            shard=self.kernels.vocabulary,
        )
        # A validation always tells the cross entropy; a step computes it if it is minimised.
        if self.hard_weight or not torch.is_grad_enabled():
            return torch.stack([soft, self.kernels.linear_cross_entropy(*student, labels)])
        return torch.stack([soft, torch.zeros_like(soft)])


@dataclass(frozen=True)
class DistillationBatch(TokenBatch):
    """Rows of tokens, and the hidden states that the teacher made of them.

    Attributes:
        teacher_hidden: [B, S, E] after the last norm; None before the teacher has seen the batch.
    """

    teacher_hidden: Tensor | None = None


@dataclass
class TeacherHead:
    """The weight of the teacher's head, which its forward pass shows and the student's loss uses.

    Attributes:
        weight: [V, E]; None before the first forward pass.
    """

    weight: Tensor | None = None

    def keep(self, weight: Tensor) -> None:
        """Keep a copy of the weight as it is gathered in the first forward pass."""
        # FSDP frees what it gathers: the copy stays. It is frozen, so that one is enough.
        if self.weight is None:
            self.weight = weight.detach().clone()


class HiddenRecord(OutputRecord):
    """Keeps the hidden states that a head is called with.

    Args:
        head: gets the weight of the head.
    """

    def __init__(self, head: TeacherHead) -> None:
        self._head = head
        self.hidden: Tensor | None = None

    def __call__(self, *outputs: Any) -> Tensor:
        """Keep hidden states [T, E] and head weight [V, E], and return nothing to minimise."""
        hidden, weight, _ = outputs
        # Later calls are for tokens farther ahead.
        if self.hidden is None:
            self.hidden = hidden
            self._head.keep(weight.to(hidden.dtype))
        return torch.zeros((), device=hidden.device)


class DistillationRecord(LossRecord):
    """The loss of a student for one forward pass.

    Args:
        task: distillation.
        teacher_hidden: [B, S, E]; None if it is set before the forward pass.
    """

    def __init__(self, task: Distill, teacher_hidden: Tensor | None) -> None:
        self._task = task
        self.teacher_hidden = teacher_hidden
        self._parts: Tensor | None = None
        self._predictions: tuple[Tensor, Tensor] | None = None

    def __call__(self, *outputs: Any) -> Tensor:
        """Return the sum that is minimised, from hidden states, head weight and labels."""
        hidden, weight, labels = outputs
        if self._parts is not None:  # tokens farther ahead, which the teacher does not predict
            further: Tensor = self._task.loss.kernels.linear_cross_entropy(hidden, weight, labels)
            return further
        head = self._task.head.weight
        assert self.teacher_hidden is not None, "the teacher comes first"
        assert head is not None, "the teacher comes first"
        teacher = self.teacher_hidden.flatten(0, 1), head
        parts = self._task.compute((hidden, weight), teacher, labels)
        self._parts = parts.detach()
        if self._task.keeps_predictions:
            vocabulary = self._task.loss.kernels.vocabulary
            self._predictions = predict_tokens(hidden, weight, vocabulary), labels
        soft, hard = self._task.loss.weights
        return soft * parts[0] + hard * parts[1]

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
    """

    loss: SoftCriterion
    compute: Callable[..., Tensor]
    head: TeacherHead = field(default_factory=TeacherHead)

    batch_class: ClassVar[type[Batch]] = DistillationBatch

    @property
    def num_sums(self) -> int:
        """The minimised sum, the divergence and the cross entropy."""
        return 3

    def prepare(self, batches: Sequence[TokenBatch], model: ParallelModel) -> Sequence[TokenBatch]:
        """Add the teacher's hidden states to batches that go through a pipeline.

        Without a pipeline `forward` does it, and one micro batch of them is held at a time.
        """
        if model.pipeline is None:
            return batches
        return [self._add_teacher(batch) for batch in batches]

    def _add_teacher(self, batch: TokenBatch) -> TokenBatch:
        rows = DistillationBatch.from_columns(batch.columns())
        # A pipeline's batch has all samples of a step: some at a time need less memory.
        pieces = [self._teach(piece) for piece in rows.split(self.data.micro_batch)]
        hidden = [piece for piece in pieces if piece is not None]
        return replace(rows, teacher_hidden=torch.cat(hidden)) if hidden else rows

    def _teach(self, batch: TokenBatch) -> Tensor | None:
        """Return the teacher's hidden states, [B, S, E]; None without the last pipeline stage."""
        assert self.frozen is not None, "a step and a validation have a teacher"
        record = run_frozen(self.frozen, self, batch, lambda _: HiddenRecord(self.head))
        if record is None or record.hidden is None:
            return None
        return record.hidden.view(*batch.tokens.shape, -1)

    def forward(
        self, forward: Callable[..., Tensor], batch: TokenBatch, record: LossRecord
    ) -> Tensor:
        """Run the forward passes of the teacher and of the student."""
        if isinstance(record, DistillationRecord):
            record.teacher_hidden = self._teach(batch)
        return super().forward(forward, batch, record)

    def record(self, batch: TokenBatch) -> LossRecord:
        """Return the criterion for a batch."""
        if self.frozen is None:  # the time of a stage is measured without a teacher
            return TokenLossRecord(self.loss.kernels.linear_cross_entropy)
        return DistillationRecord(self, getattr(batch, "teacher_hidden", None))

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
