"""The metrics of a validation, over the samples of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels.summation import sum_dtype
from ...core.errors import DataError
from .gather import SampleRows
from .meters import MeanMeters
from .metric_numbers import find_ignored, name_numbers, weigh
from .missing import measure_given
from .sample_means import SampleMeans
from .tables import MISSING, MetricConfig, Outputs

MAX_CLASSES = 1024
"""up to so many classes, a table counts pairs of class and predicted class"""
TABLE_KINDS = ("binary", "multiclass")


class MetricSet:
    """Collects predictions and targets, and computes the metrics of a recipe from them.

    Metrics over all samples share what is collected: the numbers of pairs of class and predicted
    class where that suffices, predicted classes where there are many classes, else probabilities.
    A sample counts once, whatever number of samples each rank has.

    Args:
        configs: the recipe's `[[evaluate.metrics]]`.
        outputs: what the task predicts. Without the number of classes, it is that of the first
            update of any rank.
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
        is_numbered = outputs.kind in ("multiclass", "multilabel")
        self._is_open = is_numbered and not outputs.num_classes
        self._settle(outputs)

    def _settle(self, outputs: Outputs) -> None:
        """Choose what is collected, once the number of classes is known."""
        self._outputs = outputs
        self._means = SampleMeans(self._configs, outputs)
        others = [each for each in self._configs if not each.is_sample_mean]
        self._functions = {each.row_key: each.build(outputs) for each in others}
        of_labels = {each.row_key: each.uses_labels(outputs) for each in others}
        self._needs_scores = not all(of_labels.values())
        self._streamed = [each for each in others if each.over == "batch"]
        whole = [each for each in others if each.over == "all"]
        self._of_labels = [each for each in whole if of_labels[each.row_key]]
        self._of_scores = [each for each in whole if not of_labels[each.row_key]]
        classes = outputs.num_classes if outputs.kind == "multiclass" else 2
        has_table = self._of_labels and classes <= MAX_CLASSES and outputs.kind in TABLE_KINDS
        self._classes = classes if has_table else 0
        # A row for each class, and for each number beside them that some metric ignores.
        ignored = {find_ignored(each) for each in self._of_labels}
        self._ignored = sorted(each for each in ignored if each is not None and each >= classes)
        num_pairs = (self._classes + len(self._ignored)) * self._classes
        names = [*(each.row_key for each in self._streamed), *self._means.names]
        self._meters = MeanMeters(names, self._device, num_pairs + 1)
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._meters.clear()
        self._labels, self._scores = SampleRows(), SampleRows()

    @torch.no_grad()
    def update(self, predictions: Any, targets: Any) -> None:
        """Add samples of this rank, any number of them.

        Args:
            predictions: logits, numbers of a regression, classes, or texts; see `Outputs`.
            targets: classes, 0 or 1 for each label, numbers, or texts. A negative class and NaN
                are no target, and the sample does not count; of several labels or numbers, and of a
                map, that one alone.

        Raises:
            DataError: a target is no class, shapes do not match, or torchmetrics refuses them.
        """
        if self._outputs.kind == "answer":
            if self._counts:
                self._update_answers(predictions, targets)
            return
        if self._is_open and not self._outputs.num_classes:
            self._learn_classes(predictions.shape[-1])
        maps = predictions, targets
        predictions, targets = self._arrange(predictions, targets)
        if not len(targets) or not self._counts:
            return
        self._check_targets(targets)
        if self._means.names:
            self._update_maps(*maps)
        scores = self._to_probabilities(predictions) if self._needs_scores else predictions
        is_nan = scores.isnan().flatten(1).any(1) if scores.dim() > 1 else scores.isnan()
        self._meters.extra[-1] += is_nan.sum()
        predictions, scores, targets = predictions[~is_nan], scores[~is_nan], targets[~is_nan]
        labels = self._choose_classes(predictions)
        for config in self._streamed:
            if weight := weigh(config, targets, self._outputs):
                chosen = labels if config.uses_labels(self._outputs) else scores
                self._meters.add(
                    config.row_key, self._measure_batch(config, chosen, targets), weight
                )
        if self._classes:
            pairs = self._find_rows(targets) * self._classes + labels
            ones = torch.ones_like(pairs, dtype=sum_dtype(pairs.device))
            self._meters.extra.index_add_(0, pairs, ones)
        elif self._of_labels:
            self._labels.add(labels, targets)
        if self._of_scores:
            self._scores.add(scores, targets)

    def _update_maps(self, predictions: Tensor, targets: Tensor) -> None:
        """Add the numbers of maps of classes; a negative class is none, as in `_arrange`."""
        classes = self._choose_classes(predictions)
        if self._outputs.kind == "binary":
            classes = classes.reshape(targets.shape)
        if classes.shape != targets.shape:
            self._refuse_shapes(predictions, targets)
        targets = targets.nan_to_num(nan=MISSING) if targets.is_floating_point() else targets
        for name, values in self._means.measure_maps(classes, targets.long()):
            self._meters.add(name, values)

    def _update_answers(self, predictions: Sequence[str | None], targets: Any) -> None:
        """Add the numbers of answers; None is the answer of outputs that are NaN."""
        pairs = [pair for pair in zip(predictions, targets, strict=True) if pair[0] is not None]
        self._meters.extra[-1] += len(predictions) - len(pairs)
        for name, values in self._means.measure([p for p, _ in pairs], [t for _, t in pairs]):
            self._meters.add(name, values)

    def _refuse_shapes(self, predictions: Tensor, targets: Tensor) -> NoReturn:
        shapes = f"outputs {[*predictions.shape]}, targets {[*targets.shape]}"
        raise DataError(
            f"metrics of {self._outputs.kind} outputs do not fit their shapes: {shapes}",
            "outputs have the scores of classes along the last dimension, or task.class_dim",
        )

    def _learn_classes(self, num_classes: int) -> None:
        outputs = replace(self._outputs, num_classes=num_classes)
        for config in self._configs:
            for key, message, hint in config.mismatches(outputs):
                raise DataError(f'"{key}" of the metric "{config.row_key}": {message}', hint)
        self._settle(outputs)

    def _arrange(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (or numbers) and targets with one row a sample, without missing targets."""
        kind, classes = self._outputs.kind, self._outputs.num_classes
        is_wide = kind == "multiclass" and self._outputs.has_scores
        if predictions.numel() != targets.numel() * (classes if is_wide else 1):
            self._refuse_shapes(predictions, targets)
        if kind == "regression":
            predictions, targets = predictions.float().reshape(targets.shape), targets.float()
            is_target = ~targets.isnan()
            is_target = is_target.flatten(1).any(1) if is_target.dim() > 1 else is_target
            return predictions[is_target], targets[is_target]
        targets = targets.nan_to_num(nan=MISSING) if targets.is_floating_point() else targets
        # Labels of one sample have a row; everything else is a sample of its own.
        targets = targets.long().reshape((-1, classes) if kind == "multilabel" else (-1,))
        predictions = predictions.reshape((-1, classes) if is_wide else targets.shape)
        is_target = targets >= 0
        is_target = is_target.any(1) if is_target.dim() > 1 else is_target
        return predictions[is_target], targets[is_target]

    def _check_targets(self, targets: Tensor) -> None:
        """Refuse targets beyond the classes that some metric does not ignore."""
        if self._outputs.kind == "regression":
            return
        size = self._outputs.num_classes if self._outputs.kind == "multiclass" else 2
        for target in sorted(set(targets[targets >= size].tolist())):
            ignoring = [each for each in self._configs if "ignore_index" in type(each).model_fields]
            others = [each.row_key for each in ignoring if find_ignored(each) != target]
            if others or not ignoring:
                name = (others or [self._configs[0].row_key])[0]
                raise DataError(
                    f'the metric "{name}" got the target {target}, and classes are 0 to {size - 1}',
                    f"give its ignore_index = {target}, or another target",
                )

    def _find_rows(self, targets: Tensor) -> Tensor:
        """Return the row of each target in the table of pairs."""
        if not self._ignored:
            return targets
        ignored = torch.tensor(self._ignored, device=targets.device)
        beyond = torch.searchsorted(ignored, targets) + self._classes
        return torch.where(targets < self._classes, targets, beyond)

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
        `KEY/CLASS`. Without any sample, and with an output that is NaN, a metric is NaN.
        """
        if self._is_open:
            self._agree_on_classes()
        found: dict[str, float] = self._meters.reduce()
        if self._meters.extra[-1]:
            found = {each.row_key: math.nan for each in self._configs}
        else:
            if self._of_labels:
                predictions, targets = (
                    self._expand_pairs() if self._classes else self._labels.gather(self._device)
                )
                found |= self._evaluate(self._of_labels, predictions, targets)
            if self._of_scores:
                found |= self._evaluate(self._of_scores, *self._scores.gather(self._device))
        self.clear()
        return self._agree(found)

    def _agree_on_classes(self) -> None:
        """Learn the number of classes from other ranks, if this one has had no samples."""
        number = torch.tensor(self._outputs.num_classes, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(number, dist.ReduceOp.MAX)
        if number.item() != self._outputs.num_classes:
            self._learn_classes(int(number))

    def _expand_pairs(self) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes of as many samples as the table of pairs has."""
        counts = self._meters.extra[:-1].long().cpu()
        pairs = torch.arange(len(counts)).repeat_interleave(counts)
        rows = torch.tensor([*range(self._classes), *self._ignored])
        return pairs % self._classes, rows[pairs // self._classes]

    def _evaluate(
        self, configs: Sequence[MetricConfig], predictions: Tensor, targets: Tensor
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for config in configs:
            if not len(targets) or not weigh(config, targets, self._outputs):
                found[config.row_key] = math.nan
                continue
            result = self._call(config, predictions, targets)
            numbers = name_numbers(config.row_key, result, self._outputs.labels)
            found |= {name: float(value) for name, value in numbers.items()}
        return found

    def _measure_batch(self, config: MetricConfig, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the number of a batch; a second one, such as a threshold, has no mean."""
        numbers = name_numbers("", self._call(config, predictions, targets), ())
        if "" not in numbers:
            message = f'the metric "{config.row_key}" is several numbers for these outputs'
            raise DataError(message, 'take over = "all", or an average')
        return numbers[""]

    def _call(
        self, config: MetricConfig, predictions: Tensor, targets: Tensor
    ) -> Tensor | Mapping[str, Tensor]:
        if self._outputs.kind == "regression":
            return measure_given(config, self._functions[config.row_key], predictions, targets)
        if self._outputs.kind == "multilabel" and not hasattr(config, "ignore_index"):
            whole = (targets >= 0).all(1)  # it has no word for a label that is missing
            predictions, targets = predictions[whole], targets[whole]
        return self._functions[config.row_key](predictions, targets)

    def _agree(self, found: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of rank 0: ranks with other processors may round otherwise."""
        numbers = torch.tensor(
            list(found.values()), dtype=sum_dtype(self._device), device=self._device
        )
        if dist.is_initialized():
            dist.broadcast(numbers, 0)
        return dict(zip(found, numbers.tolist(), strict=True))
