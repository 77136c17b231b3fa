"""Calls torchmetrics' functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.errors import DataError
from ...core.registry import require_package
from .tables import MetricFunction, Outputs

if TYPE_CHECKING:
    from .library import LibraryMetric


def bind_function(config: LibraryMetric, outputs: Outputs) -> MetricFunction:
    """Return a function of torchmetrics with the arguments of a recipe and of its task.

    Raises:
        EnvironmentFault: torchmetrics is not installed.
    """
    module = f"torchmetrics.functional.{config.package}"
    function = getattr(
        require_package(module, f'the metric "{config.name}"', "metrics"), config.name
    )
    arguments = config.arguments(outputs)
    if config.package == "classification":
        if not config.name.startswith(outputs.kind):
            arguments["task"] = outputs.kind
        number = {"multiclass": "num_classes", "multilabel": "num_labels"}.get(outputs.kind)
        if number:
            arguments[number] = outputs.num_classes

    def compute(predictions: Tensor, targets: Tensor) -> Tensor | Mapping[str, Tensor]:
        try:
            result: Any = function(predictions, targets, **arguments)
        except Exception as error:
            shapes = f"predictions {[*predictions.shape]}, targets {[*targets.shape]}"
            raise DataError(f'the metric "{config.name}" fails for {shapes}: {error}') from error
        if isinstance(result, tuple):  # a score, and the threshold that gives it
            return {"": result[0], "threshold": result[1]}
        values: Tensor = result
        # Of signals, torchmetrics returns a number for each sample.
        return values.mean() if config.package == "audio" else values

    return compute
