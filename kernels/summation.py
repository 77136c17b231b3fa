"""The dtype in which a device adds up losses, counts and norms."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""types of devices that have no float64"""


def sum_dtype(device: torch.device | str) -> torch.dtype:
    """Return float64, in which counts up to 2**53 are exact, or float32 where a device lacks it."""
    kind = device if isinstance(device, str) else device.type
    return torch.float32 if kind in WITHOUT_FLOAT64 else torch.float64


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of sums on the tensor's device."""
    return tensor.to(sum_dtype(tensor.device))
