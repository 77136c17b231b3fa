"""Which implementation serves each operation: decided once, readable afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Kernels:
    """The functions a model is built with, and why each was chosen."""

    attention: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rotary: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    reasons: Mapping[str, str]
    """operation -> "implementation: why" (for the log and `trainer doctor`)"""


def choose(wanted: Mapping[str, str], device_type: str, seq_len: int) -> Kernels:
    """Return the implementations for a device and a row length.

    Args:
        wanted: operation -> name of an implementation, or "auto".
        device_type: "cpu" or "cuda".
        seq_len: tokens a row.
    """
    raise NotImplementedError
