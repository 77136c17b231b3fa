"""Numbers of a row that are still on the device, and how they become floats in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.summation import widen


class Mean(NamedTuple):
    """A mean of some numbers, which a row leaves out if there are none."""

    total: Tensor
    number: Tensor


class Histogram(NamedTuple):
    """A histogram with bins of one width, which a row leaves out if it counts nothing.

    Attributes:
        low: the lower end of the first bin.
        high: the upper end of the last bin.
        counts: [bins + 1] how many values are in each bin, and how many are not finite.
    """

    low: Tensor
    high: Tensor
    counts: Tensor


Number = Tensor | float | Mean | Histogram


def to_floats(values: Mapping[str, Number]) -> dict[str, float]:
    """Return scalar tensors, numbers and means as floats, with one copy from the device.

    A mean of no numbers is left out, and so are histograms.
    """
    tensors = {
        (name, part): tensor
        for name, value in values.items()
        for part, tensor in enumerate(value if isinstance(value, Mean) else [value])
        if isinstance(tensor, Tensor)
    }
    numbers: dict[tuple[str, int], float] = {}
    if tensors:
        # Exact: fp32 and counts up to 2**53 fit in fp64.
        stacked = torch.stack([widen(value.detach()) for value in tensors.values()])
        numbers = dict(zip(tensors, stacked.tolist(), strict=True))
    floats = {}
    for name, value in values.items():
        if isinstance(value, Histogram):
            continue
        if not isinstance(value, Mean):
            floats[name] = numbers[name, 0] if isinstance(value, Tensor) else value
        elif count := numbers[name, 1]:
            floats[name] = numbers[name, 0] / count
    return floats


def to_histograms(values: Mapping[str, Number]) -> dict[str, dict[str, Any]]:
    """Return the histograms among values as JSON has them: `low`, `high` and `counts`.

    Values that are not finite are counted apart, as `non_finite`, if there are any.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if isinstance(value, Histogram):
            low, high, *counts = torch.cat(
                [value.low.view(1), value.high.view(1), value.counts]
            ).tolist()
            *bins, others = map(round, counts)
            if any(bins) or others:
                found = {"low": low, "high": high, "counts": bins}
                rows[name] = found | ({"non_finite": others} if others else {})
    return rows
