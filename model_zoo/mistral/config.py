"""Mistral's sizes (Jiang et al. 2023, arXiv:2310.06825, table 1, and config.json of later ones).

Torch-free.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

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
    Layout,
)
from ..sizes import Size

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **MLP_TENSOR},
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **MLP_HF},
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "intermediate_size": "ffn_dim",
        "sliding_window": "window",
    },
    hf_possible={"model_type": ("mistral",)},
    hf_also=HF_ALSO,
)


SEVEN = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}
PUBLISHED = {
    "dim": 5120,
    "n_layers": 40,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
}


class MistralConfig(GroupedQueryConfig):
    """Mistral: grouped-query attention, in a window if one is given, and SwiGLU."""

    layout: ClassVar = LAYOUT
    hf_class: ClassVar = "Mistral"
    flavors: ClassVar = {
        "debug": {},
        "7b-v0.1": {**SEVEN, "vocab_size": 32000, "window": 4096, "max_seq_len": 32768},
        "7b": {**SEVEN, "vocab_size": 32768, "rope_theta": 1000000.0, "max_seq_len": 32768},
        "nemo-12b": {
            **PUBLISHED,
            "ffn_dim": 14336,
            "rope_theta": 1000000.0,
            "max_seq_len": 131072,
        },
        "small-24b": {
            **PUBLISHED,
            "ffn_dim": 32768,
            "rope_theta": 100000000.0,
            "max_seq_len": 32768,
        },
        "large-123b": {
            "dim": 12288,
            "n_layers": 88,
            "n_heads": 96,
            "n_kv_heads": 8,
            "ffn_dim": 28672,
            "vocab_size": 32768,
            "rope_theta": 1000000.0,
            "max_seq_len": 131072,
        },
    }

    name: Literal["mistral"] = "mistral"
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""
    window: Size | None = None
    """positions that a block sees, its own the last; none: the whole row"""

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `MistralConfig` says of this model."""
        found = super().hf_config()
        del found["attention_bias"]  # no key of transformers' class
        return {
            "model_type": "mistral",
            **found,
            "intermediate_size": self.ffn_dim,
            "sliding_window": self.window,
        }
