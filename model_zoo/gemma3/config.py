"""The sizes of Gemma 3's language model (Gemma Team 2025, arXiv:2503.19786, section 2).

What the paper leaves out is from config.json of the published models. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..gemma2.config import KEYS_HF, LAYOUT, NAMES_HF, TENSOR, WORDS, GemmaConfig
from ..layers.rope_scaling import LINEAR_KEYS, LinearScaling
from ..layout import QK_NORM_HF, QK_NORM_TENSOR
from ..sizes import PositiveFloat, Size

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from .model import Gemma3

FULL, NEAR = WORDS
NEAR_ROPE = "rope_parameters.sliding_attention.rope_type"

LAYOUT = replace(
    LAYOUT,
    tensor={**TENSOR, **QK_NORM_TENSOR},
    hf_names={**NAMES_HF, **QK_NORM_HF},
    hf_keys={**KEYS_HF, "rope_local_base_freq": "local_rope_theta", **LINEAR_KEYS},
    hf_possible={"model_type": ("gemma3_text",), NEAR_ROPE: ("default",)},
)

SMALL = {
    "n_heads": 4,
    "n_kv_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "window": 512,
    "query_pre_attn_scalar": 256,
    "max_seq_len": 32768,
}
LARGE = {
    "head_dim": 256,
    "vocab_size": 262208,
    "window": 1024,
    "query_pre_attn_scalar": 256,
    "rope_scaling": {"factor": 8.0},
    "max_seq_len": 131072,
}


class Gemma3Config(GemmaConfig):
    """Gemma 3: normalised queries and keys; most blocks attend in a window and rotate faster."""

    layout: ClassVar = LAYOUT
    has_head_norms: ClassVar = True
    hf_heads: ClassVar = ("sequence_classification",)
    flavors: ClassVar = {
        "debug": {},
        "270m": {**SMALL, "dim": 640, "n_layers": 18, "ffn_dim": 2048},
        "1b": {**SMALL, "dim": 1152, "n_layers": 26, "ffn_dim": 6912},
        "4b": {
            **LARGE,
            "dim": 2560,
            "n_layers": 34,
            "n_heads": 8,
            "n_kv_heads": 4,
            "ffn_dim": 10240,
        },
        "12b": {
            **LARGE,
            "dim": 3840,
            "n_layers": 48,
            "n_heads": 16,
            "n_kv_heads": 8,
            "ffn_dim": 15360,
        },
        "27b": {
            **LARGE,
            "dim": 5376,
            "n_layers": 62,
            "n_heads": 32,
            "n_kv_heads": 16,
            "head_dim": 128,
            "ffn_dim": 21504,
            "query_pre_attn_scalar": 168,
        },
    }

    name: Literal["gemma3"] = "gemma3"
    full_every: Size = 6
    """one block in every `full_every` attends to the whole row"""
    rope_theta: PositiveFloat = 1000000.0
    """base of the rotary frequencies of blocks that see the whole row"""
    local_rope_theta: PositiveFloat = 10000.0
    """base of the rotary frequencies of blocks with a window"""
    rope_scaling: LinearScaling | None = None
    """division of the frequencies of blocks that see the whole row; none leaves them alone"""

    @property
    def hf_class(self) -> str:  # type: ignore[override]  # classification has a class of its own
        """What the names of transformers' classes of this model begin with."""
        return "Gemma3Text" if self.task_head else "Gemma3"

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Gemma3TextConfig` says of this model."""
        found = super().hf_config()
        near = {"rope_type": "default", "rope_theta": self.local_rope_theta}
        found["rope_parameters"] = {FULL: found["rope_parameters"], NEAR: near}
        return {"model_type": "gemma3_text", **found}

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it.

        transformers 5 has rotary settings for each kind of block; before, those of windows were
        `rope_local_base_freq`.
        """
        given, rope = dict(settings), settings.get("rope_parameters")
        near: dict[str, Any] = {}
        if isinstance(rope, dict) and (FULL in rope or NEAR in rope):
            near = rope.get(NEAR) or {}
            others = {key: value for key, value in rope.items() if key not in WORDS}
            given["rope_parameters"] = {**(rope.get(FULL) or {}), **others}
        flat = super().flatten_hf(given)
        flat["rope_local_base_freq"] = near.get("rope_theta", flat["rope_local_base_freq"])
        flat[NEAR_ROPE] = near.get("rope_type", "default")
        return flat

    def build(self, kernels: Kernels) -> Gemma3:
        """Return the module."""
        from .model import Gemma3

        return Gemma3(self, kernels, self.local_rope_theta)
