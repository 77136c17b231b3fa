"""Angles of the rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def frequencies(
    width: int,
    theta: float,
    device: torch.device | None = None,
    factors: Sequence[float] | None = None,
) -> Tensor:
    """Return theta^(-2i / K) for i = 0 .. K / 2 - 1 (arXiv:2104.09864, equation 15).

    In fp32 like the code that published checkpoints were trained with; at long contexts the last
    bit shows.

    Args:
        width: K.
        theta: base of the frequencies.
        device: of the result.
        factors: what each frequency is divided by, K / 2 of them.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    if factors is None:
        return 1.0 / theta**exponents
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * theta**exponents)


def scale_frequencies(
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
    # Equal factors (Llama 4 Scout) divide by zero; the infinities are clamped to a blend of no
    # width.
    unscaled = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - unscaled) * frequencies / factor + unscaled * frequencies


def yarn(
    frequencies: Tensor,
    theta: float,
    *,
    factor: float,
    original_max_seq_len: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend in between, by their number.

    "NTK-by-parts" of YaRN (arXiv:2309.00071, section 3.2). As in the code that models were trained
    with, the blend is linear in i of theta^(-2i / K), and not in the wavelength as in the paper.

    Args:
        frequencies: [K / 2], of `frequencies`.
        theta: base of the frequencies.
        factor: see `YarnScaling`, which also describes the other arguments.
    """
    count = len(frequencies)

    def number(turns: float) -> float:
        """Return i of the frequency that turns so often within the original context."""
        return count * math.log(original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first, last = number(beta_fast), number(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # As published: the end is kept under K, not under K / 2.
    first, last = max(first, 0), min(last, 2 * count - 1)
    # A blend of no width would divide by zero (transformers, modeling_rope_utils.py).
    if first == last:
        last += 0.001
    steps = torch.arange(count, dtype=torch.float32, device=frequencies.device)
    scaled = ((steps - first) / (last - first)).clamp(0, 1)
    return frequencies / factor * scaled + frequencies * (1 - scaled)


def interleaved_to_half(x: Tensor) -> Tensor:
    """Return [..., K] with the pair 2i and 2i + 1 moved to i and i + K / 2.

    `rotary` rotates the pairs (i, i + K / 2). Weights of some models have interleaved pairs
    (arXiv:2104.09864). Queries and keys change their order alike, so their products stay the same.
    """
    return x.view(*x.shape[:-1], -1, 2).mT.flatten(-2)


def rotation(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, fp32.

    Args:
        positions: [S] or [B, S].
        frequencies: [K / 2].
        scale: factor of both.

    Returns:
        Two tensors [..., S, 1, K / 2], to be broadcast over heads.
    """
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    if scale == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale
