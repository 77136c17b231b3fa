"""Angles of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequencies(width: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return theta^(-2i / K) for i = 0 .. K / 2 - 1 (arXiv:2104.09864, equation 15).

    In fp32 like the code that published checkpoints were trained with; at long contexts the last
    bit shows.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / theta**exponents


def stretch(
    frequencies: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_seq_len: int,
) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend in between.

    Llama 3.1's extension of the context: `rope_type = "llama3"` in Hugging Face's configs
    (transformers, modeling_rope_utils.py).
    """
    turns = original_max_seq_len * frequencies / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, fp32.

    Args:
        positions: [S] or [B, S].
        frequencies: [K / 2].

    Returns:
        Two tensors [..., S, 1, K / 2], to be broadcast over heads.
    """
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    return angles.cos(), angles.sin()
