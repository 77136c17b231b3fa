"""Metrics of a validation: their recipe tables. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...core.config import Component
from ...core.registry import Registry
from .unsupported import explain_unsupported

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["binary", "multiclass", "multilabel", "regression", "answer"]
KINDS: tuple[Kind, ...] = ("binary", "multiclass", "multilabel", "regression")
"""kinds of tensors"""
MISSING = -1
"""the target of a label that is missing"""


@dataclass(frozen=True)
class Outputs:
    """What a task predicts, for metrics.

    Attributes:
        kind: "binary": logits [N] and targets 0 or 1 [N]; "multiclass": logits [N, C] and classes
            [N]; "multilabel": logits [N, L] and targets 0 or 1 [N, L]; "regression": numbers of
            one shape; "answer": the text of each answer, None where outputs are NaN, and the
            texts that are right, several for each.
        num_classes: C or L; of a regression the numbers of a sample, 0 if unknown; 0 for binary.
        labels: names of the classes or labels, for metrics with a number for each.
        may_be_maps: True if a sample may have a class at each of its positions, so that logits are
            [N, ..., C] and classes [N, ...].
        has_scores: False if there are no logits, and predictions are classes [N]: there are too
            many tokens and classes to keep a logit of each.
    """

    kind: Kind
    num_classes: int = 0
    labels: Sequence[str] = ()
    has_scores: bool = True
    may_be_maps: bool = False


MetricFunction = Callable[["Tensor", "Tensor"], "Tensor | Mapping[str, Tensor]"]


class MetricConfig(Component):
    """Base of every metric's table."""

    key: str = ""
    """what rows call it; default: the name. Two metrics of one name need two keys"""
    over: Literal["all", "batch"] = "all"
    """"all": computed once over all samples of all ranks; "batch": for each rank's batch, and
    averaged by number of samples"""

    kinds: ClassVar[Sequence[Kind]] = KINDS
    higher_is_better: ClassVar[bool | None] = None
    """what `evaluate.direction` defaults to"""

    @property
    def missing(self) -> Literal["targets", "outputs", "samples"]:
        """What a missing target of a regression leaves out of the metric.

        "targets": that target alone, for functions of each number by itself; "outputs": that
        target, for functions of each column; "samples": the sample.
        """
        return "samples"

    @property
    def averages_outputs(self) -> bool:
        """Whether the metric is the mean of the numbers of columns."""
        return False

    @property
    def row_key(self) -> str:
        """The key of the metric in rows of evaluations."""
        return self.key or self.name

    @property
    def is_sample_mean(self) -> bool:
        """Whether `build` returns a function of one sample, whose numbers are then averaged."""
        return False

    def numbers(self, outputs: Outputs) -> Sequence[str]:
        """Return the names of the numbers of a sample, for `is_sample_mean`; "" is the key's."""
        return ("",)

    def is_scalar(self, outputs: Outputs) -> bool:
        """Return whether the metric is one number, so that `evaluate.metric` can name it."""
        return True

    def uses_labels(self, outputs: Outputs) -> bool:
        """Return whether predicted classes suffice; else the function gets probabilities."""
        return False

    def mismatches(self, outputs: Outputs) -> Iterator[tuple[str, str, str]]:
        """Yield a key, a message and a hint for what does not fit a task's outputs."""
        if outputs.kind not in self.kinds:
            message = f'"{self.name}" is no metric of {outputs.kind} outputs'
            yield "name", message, f"it measures {' and '.join(self.kinds)} outputs"
        elif not (outputs.has_scores or self.uses_labels(outputs)):
            message = f'"{self.name}" needs the probability of each class, which tokens do not keep'
            yield (
                "name",
                message,
                'take one that counts right classes, such as "accuracy", top_k = 1',
            )
        elif self.over == "batch" and not self.is_scalar(outputs):
            message = "means over batches are of one number, and this metric has several"
            yield "over", message, 'take over = "all", or an average'

    def build(self, outputs: Outputs) -> MetricFunction:
        """Return the function of predictions and targets, each a tensor of all samples on the CPU.

        Predictions are probabilities (classes for `uses_labels`), or numbers for regression. The
        result is a tensor, or several by name.
        """
        raise NotImplementedError


LIBRARY: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("torchmetrics.json").read_text("utf-8")
)["metrics"]
"""torchmetrics' functions; `python -m tests.tasks.metrics.table` writes the file"""
metrics: Registry[MetricConfig] = Registry(
    "metric",
    default="accuracy",
    built_in={name: f"engine.tasks.metrics.library:{name}" for name in LIBRARY},
    unsupported=explain_unsupported(list(LIBRARY)),
)
