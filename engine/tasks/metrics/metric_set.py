"""The metrics of a validation, over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .meters import MeanMeters
from .tables import MetricConfig, Outputs

MAX_CLASSES = 1024
"""up to so many classes, a table counts pairs of class and predicted class"""
MAX_DIMS = 8


class MetricSet:
    """Collects predictions and targets, and computes the metrics of a recipe from them.

    Metrics over all samples share what is collected: the numbers of pairs of class and predicted
    class where that suffices, predicted classes where there are many classes, else probabilities.
    A sample counts once, whatever number of samples each rank has.

    Args:
        configs: the recipe's `[[evaluate.metrics]]`.
        outputs: what the task predicts. Without the number of classes, it is that of the first
            update, and every rank has one.
        device: the device of this rank.
        counts: False on a rank that has the same samples as another one.

    Raises:
        EnvironmentFault: torchmetrics is not installed, and a metric needs it.
    """

    def __init__(
        self,
        configs: Sequence[MetricConfig],
        outputs: Outputs,
        device: torch.device,
        *,
        counts: bool = True,
    ) -> None:
        self._configs, self._device, self._counts = configs, device, counts
        self._settle(outputs)

    def _settle(self, outputs: Outputs) -> None:
        """Choose what is collected, once the number of classes is known."""
        self._outputs = outputs
        self._functions = {each.row_key: each.build(outputs) for each in self._configs}
        of_labels = {each.row_key: each.uses_labels(outputs) for each in self._configs}
        self._needs_scores = not all(of_labels.values())
        self._streamed = [each.row_key for each in self._configs if each.over == "batch"]
        whole = [each.row_key for each in self._configs if each.over == "all"]
        self._of_labels = [key for key in whole if of_labels[key]]
        self._of_scores = [key for key in whole if not of_labels[key]]
        classes = outputs.num_classes if outputs.kind == "multiclass" else 2
        self._classes = classes if self._of_labels and classes <= MAX_CLASSES else 0
        self._meters = MeanMeters(self._streamed, self._device, self._classes**2)
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._meters.clear()
        self._labels, self._scores = _Samples(), _Samples()

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add samples of this rank, any number of them.

        Args:
            predictions: logits, numbers of a regression, or classes; shapes as in `Outputs`.
            targets: classes, 0 or 1 for each label, or numbers. A negative class and NaN are no
                target, and the sample does not count.
            weights: how much each sample counts in metrics over batches; default: all the same.
        """
        if not self._outputs.num_classes and self._outputs.kind in ("multiclass", "multilabel"):
            self._settle(replace(self._outputs, num_classes=predictions.shape[-1]))
        predictions, targets = self._arrange(predictions, targets)
        if not len(targets) or not self._counts:
            return
        labels, scores = self._choose_classes(predictions), predictions
        if self._needs_scores:
            scores = self._to_probabilities(predictions)
        weight = float(len(targets)) if weights is None else weights.sum()
        for config in self._configs:
            if config.over == "batch":
                chosen = labels if config.uses_labels(self._outputs) else scores
                value = self._functions[config.row_key](chosen, targets)
                self._meters.add(config.row_key, _by_key("", value, ())[""], weight)
        if self._classes:
            pairs = targets * self._classes + labels
            ones = torch.ones_like(pairs, dtype=torch.float64)
            self._meters.extra.index_add_(0, pairs, ones)
        elif self._of_labels:
            self._labels.add(labels, targets)
        if self._of_scores:
            self._scores.add(scores, targets)

    def _arrange(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (or numbers) and targets with one row a sample, without missing targets."""
        kind, classes = self._outputs.kind, self._outputs.num_classes
        if kind == "regression":
            predictions, targets = predictions.float().view_as(targets), targets.float()
            is_target = ~targets.isnan()
        else:
            targets = targets.nan_to_num(nan=-1.0) if targets.is_floating_point() else targets
            targets = targets.long() if kind == "multilabel" else targets.long().flatten()
            is_wide = kind == "multiclass" and self._outputs.has_scores
            shape = (-1, classes) if is_wide else targets.shape
            predictions, is_target = predictions.reshape(shape), targets >= 0
        is_target = is_target.flatten(1).all(1) if is_target.dim() > 1 else is_target
        return predictions[is_target], targets[is_target]

    def _choose_classes(self, predictions: Tensor) -> Tensor:
        if not self._outputs.has_scores:
            return predictions
        if self._outputs.kind == "multiclass":
            return predictions.argmax(-1)
        return (predictions > 0).long()  # a logit of 0 is a probability of 0.5

    def _to_probabilities(self, predictions: Tensor) -> Tensor:
        # torchmetrics takes logits too, but guesses by their range that they are.
        if self._outputs.kind == "regression":
            return predictions
        if self._outputs.kind == "multiclass":
            return predictions.float().softmax(-1)
        return predictions.float().sigmoid()

    def compute(self) -> dict[str, float]:
        """Return each metric by its key, the same on all ranks, and forget the samples.

        All ranks call it, also those without samples. A metric with a number for each class has
        `KEY/CLASS`. Without any sample a metric is NaN.
        """
        found: dict[str, float] = self._meters.reduce()
        if self._of_labels:
            predictions, targets = (
                self._expand_pairs() if self._classes else self._labels.gather(self._device)
            )
            found |= self._evaluate(self._of_labels, predictions, targets)
        if self._of_scores:
            found |= self._evaluate(self._of_scores, *self._scores.gather(self._device))
        self.clear()
        return self._agree(found)

    def _expand_pairs(self) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes of as many samples as the table of pairs has."""
        counts = self._meters.extra.long().cpu()
        pairs = torch.arange(len(counts)).repeat_interleave(counts)
        return pairs % self._classes, pairs // self._classes

    def _evaluate(
        self, keys: Sequence[str], predictions: Tensor, targets: Tensor
    ) -> dict[str, float]:
        if not len(targets):
            return dict.fromkeys(keys, float("nan"))
        labels = self._outputs.labels
        return {
            name: float(value)
            for key in keys
            for name, value in _by_key(
                key, self._functions[key](predictions, targets), labels
            ).items()
        }

    def _agree(self, found: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of rank 0: ranks with other processors may round otherwise."""
        numbers = torch.tensor(list(found.values()), dtype=torch.float64, device=self._device)
        if dist.is_initialized():
            dist.broadcast(numbers, 0)
        return dict(zip(found, numbers.tolist(), strict=True))


class _Samples:
    """Predictions and targets of this rank, one row a sample."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor]] = []

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self._batches.append((predictions, targets))

    def gather(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return those of all ranks, in the order of ranks, on the CPU."""
        columns = zip(*self._batches, strict=True) if self._batches else ((), ())
        predictions, targets = (
            gather_rows(torch.cat(each) if each else None, device) for each in columns
        )
        return predictions, targets


def gather_rows(rows: Tensor | None, device: torch.device) -> Tensor:
    """Gather tensors whose first dimensions differ between ranks, which all call it.

    Args:
        rows: of this rank, [N, ...]; None: it has none, and does not know their shape.
        device: where collectives run.

    Returns:
        the rows of all ranks one after the other, on the CPU; fp32 of shape [0] if there are none.
    """
    if not dist.is_initialized():
        return torch.empty(0) if rows is None else rows.cpu()
    shape = [] if rows is None else [*rows.shape]
    is_float = rows is not None and rows.is_floating_point()
    own = [len(shape), is_float, *shape, *[0] * (MAX_DIMS - len(shape))]
    headers = [torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=device) for _ in _ranks()]
    dist.all_gather(headers, torch.tensor(own, device=device))
    known = [header.tolist() for header in headers]
    example = max(known)  # every rank with rows knows all but their number
    if not example[0]:
        return torch.empty(0)
    counts = [header[2] for header in known]
    row_shape = example[3 : 2 + example[0]]
    dtype = torch.float32 if example[1] else torch.int64
    # Padded to the largest number, because collectives want equal shapes.
    padded = torch.zeros(max(counts), *row_shape, dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in _ranks()]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count].cpu() for part, count in zip(gathered, counts, strict=True)])


def _ranks() -> range:
    return range(dist.get_world_size())


def _by_key(
    key: str, result: Tensor | Mapping[str, Tensor], labels: Sequence[str]
) -> dict[str, Tensor]:
    """Return the numbers of a result: `KEY`, `KEY/NAME`, or `KEY/CLASS` for each class."""
    if isinstance(result, Mapping):
        found: dict[str, Tensor] = {}
        for name, value in result.items():
            found |= _by_key(f"{key}/{name}" if name else key, value, labels)
        return found
    if result.numel() == 1:
        return {key: result.reshape(())}
    names = labels if len(labels) == len(result) else [str(index) for index in range(len(result))]
    return {
        inner: value
        for name, row in zip(names, result, strict=True)
        for inner, value in _by_key(f"{key}/{name}", row, labels).items()
    }
