"""Calls torchmetrics' functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.errors import DataError
from ...core.registry import require_package
from .tables import MISSING, MetricFunction, Outputs

if TYPE_CHECKING:
    from .library import LibraryMetric

PER_SAMPLE = ("audio", "shape")


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
    if config.name == "squad":
        return partial(_measure_answer, function)
    own = arguments.get("ignore_index")
    if config.package == "segmentation":
        arguments["num_classes"] = outputs.num_classes or 2
        del arguments["ignore_index"]  # it has no word for what is missing: see `_split_classes`
    if config.package == "classification":
        if not config.name.startswith(outputs.kind):
            arguments["task"] = outputs.kind
        number = {"multiclass": "num_classes", "multilabel": "num_labels"}.get(outputs.kind)
        if number:
            arguments[number] = outputs.num_classes

    def compute(predictions: Tensor, targets: Tensor) -> Tensor | Mapping[str, Tensor]:
        given = dict(arguments)
        if config.package == "segmentation":
            is_ignored = (targets < 0) | (targets == (MISSING if own is None else own))
            predictions, targets = (
                _split_classes(each, is_ignored, given["num_classes"])
                for each in (predictions, targets)
            )
        if "ignore_index" in given and (targets < 0).any():
            # One number stands for missing labels and for those that the recipe ignores.
            is_ignored = (targets < 0) if own is None else (targets < 0) | (targets == own)
            targets, given["ignore_index"] = targets.masked_fill(is_ignored, MISSING), MISSING
        try:
            result: Any = function(*prepare(config, predictions, targets), **given)
        except Exception as error:
            shapes = f"predictions {[*predictions.shape]}, targets {[*targets.shape]}"
            raise DataError(f'the metric "{config.name}" fails for {shapes}: {error}') from error
        return arrange(config, result)

    return compute


def _split_classes(classes: Tensor, is_ignored: Tensor, num_classes: int) -> Tensor:
    """Return a map of classes as a map of each class, [1, C, ...]; ignored places are in none."""
    numbers = torch.arange(num_classes, device=classes.device)
    is_class = classes.unsqueeze(0) == numbers.view(-1, *[1] * classes.dim())
    return (is_class & ~is_ignored).unsqueeze(0)


def _measure_answer(function: Any, prediction: Any, answers: Any) -> Mapping[str, Tensor]:
    """Return the numbers of a text and of the texts that are right."""
    result: Mapping[str, Tensor] = function(
        {"id": "", "prediction_text": prediction}, {"id": "", "answers": {"text": [*answers]}}
    )
    return result


def prepare(config: LibraryMetric, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function takes, of probabilities or numbers and targets."""
    if config.package == "text":  # logits of one row; the logarithms of probabilities are such
        return predictions.log().unsqueeze(0), targets.unsqueeze(0)
    is_column = predictions.dim() == 2 and predictions.shape[1] == 1
    if config.package == "regression" and is_column:  # some functions refuse columns
        return predictions.squeeze(1), targets.squeeze(1)
    return predictions, targets


def arrange(config: LibraryMetric, result: Any) -> Tensor | Mapping[str, Tensor]:
    """Return the numbers of a result by name."""
    if config.curve:
        *axes, thresholds = result
        return {
            f"{name}/{threshold:g}": values[..., index]
            for name, values in zip(config.curve, axes, strict=True)
            for index, threshold in enumerate(thresholds.tolist())
        }
    if isinstance(result, tuple):  # a score, and the threshold that gives it
        return {"": result[0], "threshold": result[1]}
    # torchmetrics returns a number for each sample of these.
    values: Tensor = result
    if getattr(config, "per_class", False):  # -1 where neither map has the class
        return values.masked_fill(values < 0, torch.nan)
    return values.mean() if config.package in PER_SAMPLE else values
