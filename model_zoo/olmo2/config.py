"""OLMo 2's sizes (OLMo et al. 2024, arXiv:2501.00656; later ones: config.json). Torch-free."""

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
    POST_NORM_TENSOR,
    QK_NORM_HF,
    Layout,
)
from ..sizes import PositiveFloat, Size

NORMS_TENSOR = {
    # Ranks sum the squares of their heads.
    "layers.{i}.attention.q_norm.weight": "columns",
    "layers.{i}.attention.k_norm.weight": "key_value",
    **POST_NORM_TENSOR,
}
NORMS_HF = {
    **QK_NORM_HF,
    "layers.{i}.attention.post_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.post_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def _without_norm(table: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in table.items() if not name.endswith(".norm.weight")}


LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={
        **ENDS_TENSOR,
        **_without_norm({**ATTENTION_TENSOR, **MLP_TENSOR}),
        **NORMS_TENSOR,
    },
    context=True,
    pipeline=True,
    gathered=("attention", "mlp"),
    hf_names={**ENDS_HF, **_without_norm({**ATTENTION_HF, **MLP_HF}), **NORMS_HF},
    hf_keys={**HF_KEYS, **GROUPED_QUERY_KEYS, "intermediate_size": "ffn_dim"},
    hf_possible={"model_type": ("olmo2",)},
    hf_also=HF_ALSO,
)


PUBLISHED = {"vocab_size": 100352, "rope_theta": 500000.0, "max_seq_len": 4096}


class Olmo2Config(GroupedQueryConfig):
    """OLMo 2: norms after attention and SwiGLU, and one norm of all queries and one of all keys."""

    layout: ClassVar = LAYOUT
    norms: ClassVar = "after"
    has_wide_norms: ClassVar = True
    hf_class: ClassVar = "Olmo2"
    hf_heads: ClassVar = ("sequence_classification",)
    flavors: ClassVar = {
        "debug": {},
        "1b": {
            **PUBLISHED,
            "dim": 2048,
            "n_layers": 16,
            "n_heads": 16,
            "n_kv_heads": 16,
            "ffn_dim": 8192,
        },
        "7b": {
            **PUBLISHED,
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 32,
            "ffn_dim": 11008,
        },
        "13b": {
            **PUBLISHED,
            "dim": 5120,
            "n_layers": 40,
            "n_heads": 40,
            "n_kv_heads": 40,
            "ffn_dim": 13824,
        },
        "32b": {
            **PUBLISHED,
            "dim": 5120,
            "n_layers": 64,
            "n_heads": 40,
            "n_kv_heads": 8,
            "ffn_dim": 27648,
        },
    }

    name: Literal["olmo2"] = "olmo2"
    norm_eps: PositiveFloat = 1e-6
    """added to the mean square in each norm"""
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Olmo2Config` says of this model."""
        return {
            "model_type": "olmo2",
            **super().hf_config(),
            "intermediate_size": self.ffn_dim,
            # Else transformers takes token 1, whose embedding it would not train.
            "pad_token_id": None,
        }
