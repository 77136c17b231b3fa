"""Qwen2.5's sizes (Yang et al. 2024, arXiv:2412.15115, table 1). Torch-free."""

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
    QKV_BIASES_HF,
    QKV_BIASES_TENSOR,
    Layout,
)
from ..sizes import PositiveFloat, Size

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **QKV_BIASES_TENSOR, **MLP_TENSOR},
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **QKV_BIASES_HF, **MLP_HF},
    hf_keys={**HF_KEYS, **GROUPED_QUERY_KEYS, "intermediate_size": "ffn_dim"},
    hf_possible={"model_type": ("qwen2",)},
    hf_also=HF_ALSO,
)


SMALL = {
    "n_kv_heads": 2,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "max_seq_len": 32768,
    "tie_embeddings": True,
}
LARGE = {"vocab_size": 152064, "rope_theta": 1000000.0, "max_seq_len": 131072}
LARGER = {**LARGE, "n_kv_heads": 8, "norm_eps": 1e-5}


class Qwen2Config(GroupedQueryConfig):
    """Qwen2 and 2.5: grouped-query attention whose queries, keys and values have biases; SwiGLU."""

    layout: ClassVar = LAYOUT
    biases: ClassVar = "qkv"
    hf_class: ClassVar = "Qwen2"
    flavors: ClassVar = {
        "debug": {},
        "0.5b": {**SMALL, "dim": 896, "n_layers": 24, "n_heads": 14, "ffn_dim": 4864},
        "1.5b": {
            **SMALL,
            "dim": 1536,
            "n_layers": 28,
            "n_heads": 12,
            "ffn_dim": 8960,
            "max_seq_len": 131072,
        },
        "3b": {**SMALL, "dim": 2048, "n_layers": 36, "n_heads": 16, "ffn_dim": 11008},
        "7b": {
            **LARGE,
            "dim": 3584,
            "n_layers": 28,
            "n_heads": 28,
            "n_kv_heads": 4,
            "ffn_dim": 18944,
        },
        "14b": {**LARGER, "dim": 5120, "n_layers": 48, "n_heads": 40, "ffn_dim": 13824},
        "32b": {**LARGER, "dim": 5120, "n_layers": 64, "n_heads": 40, "ffn_dim": 27648},
        "72b": {**LARGER, "dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim": 29568},
    }

    name: Literal["qwen2"] = "qwen2"
    norm_eps: PositiveFloat = 1e-6
    """added to the mean square in each norm"""
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Qwen2Config` says of this model."""
        found = super().hf_config()
        del found["attention_bias"]  # no key of transformers' class
        return {
            "model_type": "qwen2",
            **found,
            "use_sliding_window": False,
            "intermediate_size": self.ffn_dim,
        }
