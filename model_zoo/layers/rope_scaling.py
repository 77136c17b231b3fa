"""Settings of scaled rotary frequencies, and what config.json calls them. Torch-free."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

from pydantic import NonNegativeFloat, model_validator

from ..sizes import PositiveFloat, Size, Sizes

SCALING_KEYS = {
    "rope_parameters.factor": "rope_scaling.factor",
    "rope_parameters.low_freq_factor": "rope_scaling.low_freq_factor",
    "rope_parameters.high_freq_factor": "rope_scaling.high_freq_factor",
    "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_seq_len",
}
"""of `RopeScaling`"""
YARN_KEYS = {
    "rope_parameters.factor": "rope_scaling.factor",
    "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_seq_len",
    "rope_parameters.beta_fast": "rope_scaling.beta_fast",
    "rope_parameters.beta_slow": "rope_scaling.beta_slow",
    "rope_parameters.truncate": "rope_scaling.truncate",
    "rope_parameters.mscale": "rope_scaling.mscale",
    "rope_parameters.mscale_all_dim": "rope_scaling.mscale_all_dim",
    "rope_parameters.attention_factor": "rope_scaling.attention_factor",
}
"""of `YarnScaling`"""
LINEAR_KEYS = {"rope_parameters.factor": "rope_scaling.factor"}
"""of `LinearScaling`"""
LONGROPE_KEYS = {
    "rope_parameters.short_factor": "rope_scaling.short_factor",
    "rope_parameters.long_factor": "rope_scaling.long_factor",
    "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_seq_len",
    "rope_parameters.factor": "rope_scaling.factor",
    "rope_parameters.attention_factor": "rope_scaling.attention_factor",
}
"""of `LongRopeScaling`"""


class RopeScaling(Sizes):
    """Llama 3.1's scaling of the rotary frequencies for long contexts."""

    rotation_scale: ClassVar[float] = 1.0
    """what cosine and sine are multiplied by"""

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


class LinearScaling(Sizes):
    """Position interpolation: all rotary frequencies are divided alike (arXiv:2306.15595)."""

    rotation_scale: ClassVar[float] = 1.0
    """what cosine and sine are multiplied by"""

    factor: PositiveFloat = 8.0
    """the divisor of all rotary frequencies"""

    def hf_config(self) -> dict[str, Any]:
        """Return what config.json's `rope_parameters` say of it."""
        return {"rope_type": "linear", "factor": self.factor}


class LongRopeScaling(Sizes):
    """LongRoPE: each frequency is divided by a factor of its own (arXiv:2402.13753)."""

    short_factor: list[PositiveFloat]
    """what the frequencies are divided by, a number for each pair that is rotated"""
    long_factor: list[PositiveFloat]
    """the same for rows over original_max_seq_len"""
    use_long: bool = False
    """take long_factor; transformers does so for rows over original_max_seq_len"""
    original_max_seq_len: Size = 4096
    """the context that the model was first trained with"""
    factor: PositiveFloat = 32.0
    """how many times longer its context is; what is rotated is scaled by it"""
    attention_factor: NonNegativeFloat = 0.0
    """what is rotated is scaled by this instead; 0: by what factor gives"""

    @property
    def counts(self) -> dict[str, int]:
        """How many factors each list has."""
        return {"short_factor": len(self.short_factor), "long_factor": len(self.long_factor)}

    @property
    def rotation_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor or self.factor <= 1:
            return self.attention_factor or 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))

    def hf_config(self) -> dict[str, Any]:
        """Return what config.json's `rope_parameters` say of it."""
        found: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": self.short_factor,
            "long_factor": self.long_factor,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_seq_len,
        }
        return found | (
            {"attention_factor": self.attention_factor} if self.attention_factor else {}
        )


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
    attention_factor: NonNegativeFloat = 0.0
    """what is turned is scaled by this instead; 0: by what mscale and mscale_all_dim give"""

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
        return self.model_dump(exclude={"mscale", "mscale_all_dim", "attention_factor"})

    def sharpening(self, share: float) -> float:
        """Return what queries and keys are multiplied by (arXiv:2309.00071, equation 22)."""
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotation_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpening(self.mscale) / self.sharpening(self.mscale_all_dim)
        return self.sharpening(1.0)

    @property
    def query_scale(self) -> float:
        """What the scores of latent attention are multiplied by, beside 1 / sqrt(K).

        Source: `softmax_scale` in https://github.com/deepseek-ai/DeepSeek-V3, inference/model.py.
        """
        # Squared, because queries and keys are both multiplied by it.
        return self.sharpening(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def hf_config(self) -> dict[str, Any]:
        """Return what config.json's `rope_parameters` say of it."""
        keys = ("mscale", "mscale_all_dim", "attention_factor")
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_seq_len,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            **{key: value for key in keys if (value := getattr(self, key))},
        }
