"""How rotary frequencies are changed for longer contexts. Torch-free."""

from __future__ import annotations

import math
from typing import Any, Self

from pydantic import NonNegativeFloat, model_validator

from ..config import PositiveFloat, Size, Sizes


class RopeScaling(Sizes):
    """Llama 3.1's stretching of the rotary frequencies for long contexts."""

    factor: PositiveFloat = 8.0
    """low frequencies are divided by this"""
    low_freq_factor: PositiveFloat = 1.0
    """wavelengths over original_max_seq_len / low_freq_factor are stretched in full"""
    high_freq_factor: PositiveFloat = 4.0
    """wavelengths under original_max_seq_len / high_freq_factor are left alone"""
    original_max_seq_len: Size = 8192
    """the context that the frequencies were made for"""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must not be under "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        return self

    def hf_config(self) -> dict[str, Any]:
        """Return what Hugging Face's config.json says of it under `rope_parameters`."""
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.original_max_seq_len,
        }


class YarnScaling(Sizes):
    """YaRN: low frequencies are stretched for long contexts, and attention is made sharper."""

    factor: PositiveFloat = 40.0
    """low frequencies are divided by this"""
    original_max_seq_len: Size = 4096
    """the context that the frequencies were made for"""
    beta_fast: PositiveFloat = 32.0
    """frequencies that turn more often than this within that context are left alone"""
    beta_slow: PositiveFloat = 1.0
    """frequencies that turn less often than this within it are stretched in full"""
    truncate: bool = True
    """whether the blend between the two starts and ends at whole numbers of frequencies"""
    mscale: NonNegativeFloat = 0.0
    """how much of YaRN's sharpening queries and keys get where they are turned; given together with
    mscale_all_dim, else all of it"""
    mscale_all_dim: NonNegativeFloat = 0.0
    """how much of it all dims get; what is turned is then scaled by the ratio of the two"""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow})"
            )
        return self

    @property
    def blend(self) -> dict[str, Any]:
        """The arguments of `rotary.yarn`."""
        return self.model_dump(exclude={"mscale", "mscale_all_dim"})

    def sharpening(self, share: float) -> float:
        """Return what queries and keys are multiplied by (arXiv:2309.00071, equation 22)."""
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotation_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self.sharpening(self.mscale) / self.sharpening(self.mscale_all_dim)
        return self.sharpening(1.0)

    @property
    def query_scale(self) -> float:
        """What the scores of latent attention are multiplied by, beside 1 / sqrt(K).

        Source: `softmax_scale` in https://github.com/deepseek-ai/DeepSeek-V3, inference/model.py.
        """
        return self.sharpening(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def hf_config(self) -> dict[str, Any]:
        """Return what config.json's `rope_parameters` say of it."""
        both = {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_seq_len,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            **{key: value for key, value in both.items() if value},
        }
