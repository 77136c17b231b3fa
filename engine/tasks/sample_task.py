"""Tasks whose loss is a criterion on the outputs of a model and the fields of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from ..data.batch import Batch
from ..observe.numbers import Mean, Number
from .criteria import Criterion, Fields, widen
from .metrics.tables import Outputs
from .outputs import KeptOutputs
from .predictions import list_outputs
from .task import LossRecord, Task

B = TypeVar("B", bound=Batch)


class CriterionRecord(LossRecord):
    """A criterion for one forward pass.

    Args:
        criterion: the criterion.
        fields: the fields of the batch.
        select: maps the outputs of the model to those of the samples that count.
    """

    def __init__(
        self, criterion: Criterion, fields: Fields, select: Callable[[Any], Any] = lambda x: x
    ) -> None:
        self._criterion = criterion
        self._fields = fields
        self._select = select
        self.outputs: Any = None
        """the outputs of the samples that count, without gradient"""

    def __call__(self, *outputs: Any) -> Tensor:
        """Return the sum of each term, [K]."""
        selected = self._select(outputs if len(outputs) > 1 else outputs[0])
        self.outputs = selected.detach() if isinstance(selected, Tensor) else selected
        sums = self._criterion.sums(selected, self._fields)
        return torch.stack([widen(sums[name]) for name in self._criterion.weights])

    def sums(self, minimized: Tensor) -> Tensor:
        """Return the sum of each term, [K]."""
        return minimized.detach()

    def predictions(self) -> tuple[Any, Any] | None:
        """Return the outputs and the field that the criterion compares them with."""
        target = self._fields.get(self._criterion.target)
        if target is None or not isinstance(self.outputs, Tensor):
            return None
        return self.outputs, target


@dataclass(frozen=True, kw_only=True)
class CriterionTask(Task[B], Generic[B]):
    """A task whose loss is a criterion.

    Sums are those of the terms; counts are the samples, and those of the terms.
    """

    loss: Criterion

    def wrap_loss(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the task as it is: the loss of a few outputs for each sample is small."""
        return self

    @property
    def num_sums(self) -> int:
        """The number of terms."""
        return len(self.loss.weights)

    def fields(self, batch: B) -> Fields:
        """Return the fields of the samples that count, which the criterion is given."""
        return batch.columns()

    def num_samples(self, batch: B) -> int | Tensor:
        """Return how many samples of a batch count."""
        return len(batch)

    def counts(self, batch: B) -> Tensor:
        """Count the samples, and what each term is a mean over."""
        counts = self.loss.counts(self.fields(batch))
        device = next(iter(batch.columns().values())).device
        numbers = [self.num_samples(batch), *(counts[name] for name in self.loss.weights)]
        # Filled on the device: a copy from the host would wait for it.
        return torch.stack(
            [
                number if isinstance(number, Tensor) else torch.full((), number, device=device)
                for number in numbers
            ]
        )

    def factors(self, counts: Tensor, scale: float) -> Tensor:
        """Divide each term by its count."""
        terms = zip(self.loss.weights.values(), _divisor(counts[1:]).unbind(), strict=True)
        dtype = torch.get_default_dtype()  # fp64 where plans are compared, else fp32
        return torch.stack([(scale * weight / count).to(dtype) for weight, count in terms])

    def record(self, batch: B) -> CriterionRecord:
        """Return the criterion for a batch."""
        return CriterionRecord(self.loss, self.fields(batch))

    def output_record(self, batch: B) -> KeptOutputs:
        """Return what keeps the outputs of the model."""
        return KeptOutputs()

    def predict(
        self, batch: B, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the outputs of each sample as lists, and classes by their numbers."""
        assert isinstance(record, KeptOutputs), "output_record returns one"
        return list_outputs(record.outputs, meaning)

    def _weigh(self, sums: Tensor, counts: Tensor, names: Sequence[str]) -> Tensor:
        means = dict(zip(self.loss.weights, (sums / _divisor(counts[1:])).unbind(), strict=True))
        return torch.stack([self.loss.weights[name] * means[name] for name in names]).sum()

    def mean_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted means of all terms but regularisers."""
        names = [name for name in self.loss.weights if name not in self.loss.regularizers]
        return self._weigh(sums, counts, names)

    def total_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted means of all terms."""
        return self._weigh(sums, counts, list(self.loss.weights))

    def metrics(self, sums: Tensor, counts: Tensor) -> Mapping[str, Number]:
        """Return the mean of each term, where there are several."""
        if len(self.loss.weights) == 1:
            return {}
        means = zip(self.loss.weights, sums.unbind(), counts[1:].unbind(), strict=True)
        return {f"loss/{name}": Mean(total, count) for name, total, count in means}

    def evaluation(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return `loss` and, where there are several terms, the mean of each."""
        totals, numbers = torch.tensor(sums), torch.tensor(counts)
        loss = self.mean_loss(totals, numbers).item()
        if len(sums) == 1:
            return {"loss": loss}
        means = zip(self.loss.weights, sums, counts[1:], strict=True)
        return {"loss": loss} | {f"loss/{name}": s / n for name, s, n in means if n}


def _divisor(counts: Tensor) -> Tensor:
    """Return counts, and 1 where there is nothing to count."""
    return torch.where(counts == 0, 1, counts)
