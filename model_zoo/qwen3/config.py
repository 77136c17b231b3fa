"""Qwen3's sizes (Yang et al. 2025, arXiv:2505.09388, tables 1 and 2). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..grouped_query_config import GroupedQueryConfig
from ..layers.configs import MoESettings
from ..layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    EXPERTS_FORMS,
    EXPERTS_HF,
    EXPERTS_STACKS,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MLP_HF,
    MLP_TENSOR,
    MOE_TENSOR,
    QK_NORM_HF,
    QK_NORM_TENSOR,
    Layout,
)
from ..sizes import PositiveFloat, Size

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **QK_NORM_TENSOR, **MLP_TENSOR, **MOE_TENSOR},
    experts="mlp.experts",
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **QK_NORM_HF, **MLP_HF, **EXPERTS_HF},
    hf_stacks=EXPERTS_STACKS,
    hf_forms=EXPERTS_FORMS,
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "intermediate_size": "ffn_dim",
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "moe_intermediate_size": "moe.expert_ffn_dim",
        "norm_topk_prob": "moe.normalize",
    },
    hf_possible={"model_type": ("qwen3", "qwen3_moe")},
    hf_also={**HF_ALSO, "router_aux_loss_coef": "moe.aux_weight"},
)


PUBLISHED = {
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "max_seq_len": 40960,
}
BALANCE = {"aux_weight": 1e-3, "aux_scope": "global"}
"""the scope: section 2; the weight: router_aux_loss_coef of the published models"""


class Qwen3Config(GroupedQueryConfig):
    """Qwen3: grouped-query attention with normalised queries and keys, and SwiGLU or experts."""

    layout: ClassVar = LAYOUT
    has_head_norms: ClassVar = True
    flavors: ClassVar = {
        "debug": {},
        "0.6b": {
            **PUBLISHED,
            "dim": 1024,
            "n_layers": 28,
            "n_heads": 16,
            "ffn_dim": 3072,
            "tie_embeddings": True,
        },
        "1.7b": {
            **PUBLISHED,
            "dim": 2048,
            "n_layers": 28,
            "n_heads": 16,
            "ffn_dim": 6144,
            "tie_embeddings": True,
        },
        "4b": {
            **PUBLISHED,
            "dim": 2560,
            "n_layers": 36,
            "n_heads": 32,
            "ffn_dim": 9728,
            "tie_embeddings": True,
        },
        "8b": {**PUBLISHED, "dim": 4096, "n_layers": 36, "n_heads": 32, "ffn_dim": 12288},
        "14b": {**PUBLISHED, "dim": 5120, "n_layers": 40, "n_heads": 40, "ffn_dim": 17408},
        "32b": {**PUBLISHED, "dim": 5120, "n_layers": 64, "n_heads": 64, "ffn_dim": 25600},
        "moe_debug": {"moe": BALANCE},
        # Of our own, with the sizes of OLMoE (arXiv:2409.02060) but half as many parameters.
        "moe_1b": {
            **PUBLISHED,
            "dim": 2048,
            "n_layers": 16,
            "n_heads": 16,
            "n_kv_heads": 4,
            "moe": {
                **BALANCE,
                "num_experts": 64,
                "experts_per_token": 8,
                "expert_ffn_dim": 512,
            },
        },
        "30b-a3b": {
            **PUBLISHED,
            "dim": 2048,
            "n_layers": 48,
            "n_heads": 32,
            "n_kv_heads": 4,
            "ffn_dim": 6144,
            "moe": {
                **BALANCE,
                "num_experts": 128,
                "experts_per_token": 8,
                "expert_ffn_dim": 768,
            },
        },
        "235b-a22b": {
            **PUBLISHED,
            "dim": 4096,
            "n_layers": 94,
            "n_heads": 64,
            "n_kv_heads": 4,
            "ffn_dim": 12288,
            "moe": {
                **BALANCE,
                "num_experts": 128,
                "experts_per_token": 8,
                "expert_ffn_dim": 1536,
            },
        },
    }

    name: Literal["qwen3"] = "qwen3"
    head_dim: Size = 32
    """width of a head"""
    norm_eps: PositiveFloat = 1e-6
    """added to the mean square in each norm"""
    ffn_dim: Size = 192
    """width inside the feed-forward layer, where there are no experts"""
    moe: MoESettings | None = None
    """experts, in place of the feed-forward layer of each block"""

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.moe is not None:
            self.moe.require(score="softmax", scale=1.0, num_shared=0, groups=1)
        return self

    @property
    def hf_class(self) -> str:  # type: ignore[override]  # a name for each of the two kinds
        """What the names of transformers' classes of this model begin with."""
        return "Qwen3" if self.moe is None else "Qwen3Moe"

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Qwen3Config` or `Qwen3MoeConfig` says of this model."""
        found = {
            **super().hf_config(),
            "use_sliding_window": False,
            "intermediate_size": self.ffn_dim,
        }
        if self.moe is None:
            return {"model_type": "qwen3", **found}
        return {
            "model_type": "qwen3_moe",
            **found,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_experts": self.moe.num_experts,
            "num_experts_per_tok": self.moe.experts_per_token,
            "moe_intermediate_size": self.moe.expert_ffn_dim,
            "norm_topk_prob": self.moe.normalize,
            "router_aux_loss_coef": self.moe.aux_weight,
        }

    @classmethod
    def sizes_from_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of `[model]` that config.json says.

        Raises:
            SettingsError: a size is missing, or the family cannot compute what is asked for.
        """
        sizes = super().sizes_from_hf(settings)
        if "moe" in sizes:
            # config.json has no key for the scope.
            sizes["moe"]["aux_scope"] = BALANCE["aux_scope"]
        return sizes

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        flat = super().flatten_hf(settings)
        width, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
        if flat.get("head_dim") is None and isinstance(width, int) and isinstance(heads, int):
            # transformers' class of the models with experts has no default for it.
            flat["head_dim"] = width // max(1, heads)
        return flat
