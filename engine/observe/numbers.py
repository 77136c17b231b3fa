"""Numbers of a row that are still on the device, and how they become floats in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Mean(NamedTuple):
    """A mean of some numbers, which a row leaves out if there are none."""

    total: Tensor
    number: Tensor


Number = Tensor | float | Mean


def to_floats(values: Mapping[str, Number]) -> dict[str, float]:
    """Return scalar tensors, numbers and means as floats, with one copy from the device.

    A mean of no numbers is left out.
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
        stacked = torch.stack([value.detach().double() for value in tensors.values()])
        numbers = dict(zip(tensors, stacked.tolist(), strict=True))
    floats = {}
    for name, value in values.items():
        if not isinstance(value, Mean):
            floats[name] = numbers[name, 0] if isinstance(value, Tensor) else value
        elif count := numbers[name, 1]:
            floats[name] = numbers[name, 0] / count
    return floats
