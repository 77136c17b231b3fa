"""Leaves missing targets of a regression with several numbers a sample out of a metric."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .tables import MetricConfig, MetricFunction


def measure_given(
    config: MetricConfig, function: MetricFunction, predictions: Tensor, targets: Tensor
) -> Tensor | Mapping[str, Tensor]:
    """Return a metric of the targets that are given; NaN is none.

    Args:
        config: the metric's table, which says what a missing target leaves out.
        function: the metric.
        predictions: numbers, [N, ...].
        targets: numbers of the same shape. Each sample has at least one.
    """
    is_given = ~targets.isnan()
    if is_given.all():
        return function(predictions, targets)
    if config.missing == "targets":
        return function(predictions[is_given], targets[is_given])
    if config.missing == "outputs" and targets.dim() == 2:
        columns = zip(predictions.unbind(1), targets.unbind(1), is_given.unbind(1), strict=True)
        results = [function(p[given], t[given]) for p, t, given in columns]
        numbers = torch.stack([torch.as_tensor(each).reshape(()) for each in results])
        return numbers.mean() if config.averages_outputs else numbers
    whole = is_given.flatten(1).all(1)
    if not whole.any():
        return torch.tensor(torch.nan)
    return function(predictions[whole], targets[whole])
