"""Training in float64, where plans differ by what they compute and rounding is not seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from trainer.engine.precision.hardware import DTYPES


@contextmanager
def in_float64() -> Iterator[None]:
    """Let a recipe's fp32 mean float64, in a process of its own."""
    before, norms = torch.get_default_dtype(), torch._foreach_norm
    torch.set_default_dtype(torch.float64)

    def wide_norms(tensors, order=2, dtype=None):
        return norms(tensors, order)

    try:
        with patch.dict(DTYPES, fp32=torch.float64), patch("torch._foreach_norm", wide_norms):
            yield
    finally:
        torch.set_default_dtype(before)
