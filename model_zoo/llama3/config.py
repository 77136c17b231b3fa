"""Llama 3's sizes (Grattafiori et al. 2024, arXiv:2407.21783, table 3). Torch-free."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..grouped_query_config import GroupedQueryConfig
from ..layers.rope_scaling import SCALING_KEYS, RopeScaling
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
    hf_keys={**HF_KEYS, **GROUPED_QUERY_KEYS, "intermediate_size": "ffn_dim", **SCALING_KEYS},
    hf_possible={"model_type": ("llama",)},
    hf_also=HF_ALSO,
)


class Llama3Config(GroupedQueryConfig):
    """Llama 3: pre-norm blocks of grouped-query attention with RoPE, and SwiGLU."""

    layout: ClassVar = LAYOUT
    hf_class: ClassVar = "Llama"
    flavors: ClassVar = {
        "debug": {},
        "1b": {
            "dim": 2048,
            "n_layers": 16,
            "n_heads": 32,
            "n_kv_heads": 8,
            "ffn_dim": 8192,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 32.0},
            "max_seq_len": 131072,
            "tie_embeddings": True,
        },
        "3b": {
            "dim": 3072,
            "n_layers": 28,
            "n_heads": 24,
            "n_kv_heads": 8,
            "ffn_dim": 8192,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 32.0},
            "max_seq_len": 131072,
            "tie_embeddings": True,
        },
        "8b": {
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "ffn_dim": 14336,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0},
            "max_seq_len": 131072,
        },
        "70b": {
            "dim": 8192,
            "n_layers": 80,
            "n_heads": 64,
            "n_kv_heads": 8,
            "ffn_dim": 28672,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0},
            "max_seq_len": 131072,
        },
        "405b": {
            "dim": 16384,
            "n_layers": 126,
            "n_heads": 128,
            "n_kv_heads": 8,
            "ffn_dim": 53248,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0},
            "max_seq_len": 131072,
        },
    }

    name: Literal["llama3"] = "llama3"
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""
    rope_scaling: RopeScaling | None = None
    """stretching of the rotary frequencies; none leaves them alone"""

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `LlamaConfig` says of this model."""
        return {
            "model_type": "llama",
            **super().hf_config(),
            "mlp_bias": False,
            "intermediate_size": self.ffn_dim,
        }
