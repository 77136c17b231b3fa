"""Soft capping of scores and logits (Gemma Team 2024, arXiv:2408.00118, section 2)."""

from __future__ import annotations

from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which lies between -cap and cap."""
    return (x / cap).tanh() * cap


def softcap_slope(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of `softcap` at x, from its value there: 1 - tanh(x / cap)^2.

    A value far below -cap, such as that of a masked score, gets 0.
    """
    return (1 - (capped / cap).square()).clamp(min=0)
