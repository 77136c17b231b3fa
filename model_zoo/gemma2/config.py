"""Gemma 2's sizes (Gemma Team 2024, arXiv:2408.00118, table 1), and what it shares with Gemma 3.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat

from ..grouped_query_config import GroupedQueryConfig
from ..layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MLP_HF,
    MLP_TENSOR,
    POST_NORM_TENSOR,
    Layout,
)
from ..sizes import PositiveFloat, Size

TENSOR = {**ENDS_TENSOR, **ATTENTION_TENSOR, **MLP_TENSOR, **POST_NORM_TENSOR}
NAMES_HF = {
    **ENDS_HF,
    **ATTENTION_HF,
    **MLP_HF,
    "layers.{i}.attention.post_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp.post_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}
KEYS_HF = {
    **HF_KEYS,
    **GROUPED_QUERY_KEYS,
    "intermediate_size": "ffn_dim",
    "sliding_window": "window",
    "sliding_window_pattern": "full_every",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
}
PATTERN = "_sliding_window_pattern"
"""where transformers saves every how many blocks one sees the whole row"""
WORDS = ("full_attention", "sliding_attention")

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor=TENSOR,
    context=True,
    pipeline=True,
    hf_names=NAMES_HF,
    hf_keys={
        **KEYS_HF,
        "attn_logit_softcapping": "attention_softcap",
        "final_logit_softcapping": "logit_softcap",
    },
    hf_possible={"model_type": ("gemma2",)},
    hf_follow=("layer_types",),
    hf_also=HF_ALSO,
)


class GemmaConfig(GroupedQueryConfig):
    """What Gemma 2 and 3 share: norms around each half of a block, and GeGLU."""

    norms: ClassVar = "both"
    has_zero_centered_norms: ClassVar = True
    has_geglu: ClassVar = True

    norm_eps: PositiveFloat = 1e-6
    """added to the mean square in each norm"""
    tie_embeddings: bool = True
    """one weight for the embedding and the output projection"""
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""
    window: Size = 64
    """positions that a block with a window sees, its own the last"""
    full_every: Size = 2
    """one block in every `full_every` attends to the whole row"""
    query_pre_attn_scalar: Size = 16
    """scores of attention are divided by its square root, whatever the width of a head is"""

    def window_of(self, number: int) -> int | None:
        """Return how many positions block `number` sees; None: the whole row."""
        return self.window if (number + 1) % self.full_every else None

    @property
    def embed_scale(self) -> float:
        """What the embedding's output is multiplied by."""
        return math.sqrt(self.dim)

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by, beside 1 / sqrt(K)."""
        return math.sqrt(self.head_width / self.query_pre_attn_scalar)

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' configs of both say of this model."""
        found = super().hf_config()
        del found["hidden_act"]  # no key of transformers' classes
        windows = [self.window_of(number) for number in range(self.n_layers)]
        return {
            **found,
            "hidden_activation": "gelu_pytorch_tanh",
            "intermediate_size": self.ffn_dim,
            "sliding_window": self.window,
            "layer_types": [WORDS[window is not None] for window in windows],
            PATTERN: self.full_every,
            "query_pre_attn_scalar": self.query_pre_attn_scalar,
            # Else transformers takes token 0, whose embedding it would not train.
            "pad_token_id": None,
        }

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        flat = super().flatten_hf(settings)
        pattern = flat.get(PATTERN) or flat.get("sliding_window_pattern")
        flat["sliding_window_pattern"] = pattern or cls.model_fields["full_every"].default
        kinds = flat.get("layer_types")
        # Of a model with none, the pattern that is told; what contradicts it, `hf_follow` finds.
        if isinstance(kinds, list) and WORDS[0] in kinds:
            flat["sliding_window_pattern"] = kinds.index(WORDS[0]) + 1
        return flat


SHARED = {"head_dim": 256, "vocab_size": 256000, "window": 4096, "query_pre_attn_scalar": 256}


class Gemma2Config(GemmaConfig):
    """Gemma 2: capped scores and logits; every other block attends in a window."""

    layout: ClassVar = LAYOUT
    hf_class: ClassVar = "Gemma2"
    hf_heads: ClassVar = ("sequence_classification", "token_classification")
    flavors: ClassVar = {
        "debug": {},
        "2b": {
            **SHARED,
            "dim": 2304,
            "n_layers": 26,
            "n_heads": 8,
            "n_kv_heads": 4,
            "ffn_dim": 9216,
        },
        "9b": {
            **SHARED,
            "dim": 3584,
            "n_layers": 42,
            "n_heads": 16,
            "n_kv_heads": 8,
            "ffn_dim": 14336,
        },
        "27b": {
            **SHARED,
            "dim": 4608,
            "n_layers": 46,
            "n_heads": 32,
            "n_kv_heads": 16,
            "head_dim": 128,
            "ffn_dim": 36864,
            "query_pre_attn_scalar": 144,
        },
    }

    name: Literal["gemma2"] = "gemma2"
    attention_softcap: NonNegativeFloat = 50.0
    """the softcap of attention scores; 0: scores are not capped"""
    logit_softcap: NonNegativeFloat = 30.0
    """the softcap of token logits; 0: logits are not capped"""

    @property
    def score_softcap(self) -> float | None:
        """The softcap of attention scores; None: scores are not capped."""
        return self.attention_softcap or None

    @property
    def head_softcap(self) -> float | None:
        """The softcap of token logits; None: logits are not capped."""
        return self.logit_softcap or None

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Gemma2Config` says of this model."""
        return {
            "model_type": "gemma2",
            **super().hf_config(),
            "attn_logit_softcapping": self.score_softcap,
            "final_logit_softcapping": self.head_softcap,
        }

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        flat = super().flatten_hf(settings)
        keys = ("attn_logit_softcapping", "final_logit_softcapping")
        return {**flat, **{key: flat.get(key) or 0.0 for key in keys}}
