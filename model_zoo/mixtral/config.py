"""Mixtral's sizes (Jiang et al. 2024, arXiv:2401.04088, table 1). Torch-free."""

from __future__ import annotations

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
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MOE_TENSOR,
    Layout,
)

EXPERTS = "model.layers.{i}.block_sparse_moe.experts"
EXPERTS_HF = {
    "layers.{i}.mlp.norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
    "layers.{i}.mlp.experts.gate_up": f"{EXPERTS}.gate_up_proj",
    "layers.{i}.mlp.experts.down": f"{EXPERTS}.down_proj",
}

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **MOE_TENSOR},
    experts="mlp.experts",
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **EXPERTS_HF},
    hf_stacks={
        "layers.{i}.mlp.experts.gate_up": (
            f"{EXPERTS}.{{j}}.w1.weight",
            f"{EXPERTS}.{{j}}.w3.weight",
        ),
        "layers.{i}.mlp.experts.down": (f"{EXPERTS}.{{j}}.w2.weight",),
    },
    hf_forms=EXPERTS_FORMS,
    hf_modules={"block_sparse_moe": "mlp"},
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "intermediate_size": "moe.expert_ffn_dim",
    },
    hf_possible={"model_type": ("mixtral",)},
    hf_also={**HF_ALSO, "router_aux_loss_coef": "moe.aux_weight"},
)


FORM = {"num_shared": 0, "score": "softmax", "normalize": True}
BALANCE = {"aux_weight": 1e-3, "aux_scope": "global"}
"""the weight: what transformers takes where config.json does not say router_aux_loss_coef"""


class MixtralConfig(GroupedQueryConfig):
    """Mixtral: Llama's attention, and experts in each block."""

    layout: ClassVar = LAYOUT
    hf_class: ClassVar = "Mixtral"
    flavors: ClassVar = {
        "debug": {"moe": BALANCE},
        "8x7b": {
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "vocab_size": 32000,
            "rope_theta": 1000000.0,
            "max_seq_len": 32768,
            "moe": {**BALANCE, "num_experts": 8, "expert_ffn_dim": 14336},
        },
        "8x22b": {
            "dim": 6144,
            "n_layers": 56,
            "n_heads": 48,
            "n_kv_heads": 8,
            "vocab_size": 32768,
            "rope_theta": 1000000.0,
            "max_seq_len": 65536,
            "moe": {**BALANCE, "num_experts": 8, "expert_ffn_dim": 16384},
        },
    }

    name: Literal["mixtral"] = "mixtral"
    moe: MoESettings = MoESettings()
    """experts of each block"""

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        self.moe.require(**FORM, scale=1.0, groups=1)
        return self

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `MixtralConfig` says of this model."""
        found = super().hf_config()
        del found["attention_bias"]  # no key of transformers' class
        return {
            "model_type": "mixtral",
            **found,
            "sliding_window": None,
            "num_local_experts": self.moe.num_experts,
            "num_experts_per_tok": self.moe.experts_per_token,
            "intermediate_size": self.moe.expert_ffn_dim,
            "router_aux_loss_coef": self.moe.aux_weight,
        }
