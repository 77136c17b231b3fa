"""Criteria: named sums of losses from the outputs of a model and the fields of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.summation import sum_dtype
from ..data.batch import IGNORED

Fields = Mapping[str, Tensor]


def widen(x: Tensor) -> Tensor:
    """Return numbers in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Criterion(ABC):
    """The criterion of a task.

    Each term of the loss is a sum and a count. Sums and counts are added over micro batches and
    ranks, and the loss is the weighted sum of their ratios: an exact mean, however samples are
    divided. Counts follow from the batch alone, because gradients are scaled by them.
    """

    weights: ClassVar[Mapping[str, float]] = {"loss": 1.0}
    """the factor of each term in the loss that is minimised, by name"""
    regularizers: ClassVar[frozenset[str]] = frozenset()
    """terms that are minimised and are no part of the loss in the log"""
    target: str = "labels"
    """the field that outputs are compared with, also by metrics"""

    @abstractmethod
    def sums(self, outputs: Any, fields: Fields) -> Mapping[str, Tensor]:
        """Return the sum of each term over the samples of a batch, scalars.

        Args:
            outputs: what the model returns.
            fields: the fields of the batch by name.
        """

    def counts(self, fields: Fields) -> Mapping[str, Tensor | int]:
        """Return what each sum is divided by; the number of samples unless overridden."""
        return dict.fromkeys(self.weights, len(next(iter(fields.values()))))


@dataclass(frozen=True)
class Elementwise(Criterion):
    """A mean over elements of a loss of outputs and targets of one shape.

    Elements whose target is NaN are left out.

    Attributes:
        function: maps outputs and targets to the loss of each element, as functions of
            torch.nn.functional do with `reduction="none"`.
        target: the field with the targets.
    """

    function: Callable[..., Tensor]
    target: str = "labels"

    def sums(self, outputs: Any, fields: Fields) -> Mapping[str, Tensor]:
        """Return the sum over elements, in fp32 at least."""
        wide = widen(outputs)
        targets = fields[self.target].to(wide.dtype)
        outputs = wide.view_as(targets)
        is_counted = ~targets.isnan()
        losses = self.function(outputs, targets.nan_to_num(), reduction="none")
        return {"loss": torch.where(is_counted, losses, 0).sum()}

    def counts(self, fields: Fields) -> Mapping[str, Tensor]:
        """Return the number of elements that have a target."""
        return {"loss": (~fields[self.target].float().isnan()).sum()}


@dataclass(frozen=True)
class ClassCrossEntropy(Criterion):
    """Cross entropy of classes, a mean over labels as torch.nn.CrossEntropyLoss takes it.

    Attributes:
        label_smoothing: share of the target that is spread over all classes (Szegedy et al. 2016,
            arXiv:1512.00567, section 7).
        class_weights: the weight of each class; the mean is then over weights. Empty: all are 1.
        target: the field with the labels, -100 ignored.
    """

    label_smoothing: float = 0.0
    class_weights: Sequence[float] = ()
    target: str = "labels"

    def sums(self, outputs: Any, fields: Fields) -> Mapping[str, Tensor]:
        """Return the sum over labels, in fp32 at least.

        Args:
            outputs: [..., C] scores of classes.
            fields: the target has the shape of the outputs without the last dimension.
        """
        loss = F.cross_entropy(
            widen(outputs.flatten(0, -2)),
            fields[self.target].flatten(),
            weight=self._weights(outputs.device),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return {"loss": loss}

    def counts(self, fields: Fields) -> Mapping[str, Tensor]:
        """Return the number of labels, or the sum of the weights of their classes."""
        labels = fields[self.target]
        weights = self._weights(labels.device)
        if weights is None:
            return {"loss": (labels != IGNORED).sum()}
        counted = torch.where(labels == IGNORED, 0, weights[labels.clamp(min=0)])
        return {"loss": counted.sum().to(sum_dtype(counted.device))}

    def _weights(self, device: torch.device) -> Tensor | None:
        return torch.tensor(self.class_weights, device=device) if self.class_weights else None


@dataclass(frozen=True)
class ConnectionistTemporal(Criterion):
    """Connectionist temporal classification (Graves et al. 2006), a mean over samples.

    Outputs are scores [B, T, C]. Fields are `labels` [B, L], `input_lengths` [B] and
    `label_lengths` [B]; without the lengths all of T and L count.

    Attributes:
        blank: the class that stands for no label.
    """

    blank: int = 0

    def sums(self, outputs: Any, fields: Fields) -> Mapping[str, Tensor]:
        """Return the sum over samples; a sample whose labels cannot fit its inputs counts as 0."""
        labels, (rows, steps, _) = fields["labels"], outputs.shape
        full = torch.full((rows,), steps), torch.full((rows,), labels.shape[1])
        loss = F.ctc_loss(
            widen(outputs).log_softmax(-1).transpose(0, 1),
            labels,
            fields.get("input_lengths", full[0]),
            fields.get("label_lengths", full[1]),
            blank=self.blank,
            reduction="sum",
            zero_infinity=True,
        )
        return {"loss": loss}
