"""Gated feed-forward activation (Shazeer 2020, arXiv:2002.05202, equation 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up
