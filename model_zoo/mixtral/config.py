"""Mixtral's sizes (Jiang et al. 2024, arXiv:2401.04088, table 1). Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..decoder_config import GroupedQueryConfig, moe_shapes
from ..layers.moe_config import MoESettings
from .layout import LAYOUT

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from .model import Mixtral

FORM = {"num_shared": 0, "score": "softmax", "normalize": True, "balance_bias": False}
BALANCE = {"aux_weight": 1e-3, "aux_scope": "global"}
"""the weight: what transformers takes where config.json does not say router_aux_loss_coef"""


class MixtralConfig(GroupedQueryConfig):
    """Mixtral: Llama's attention, and experts in each block."""

    layout: ClassVar = LAYOUT
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

    def block_shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of a block's parameters."""
        return {**self.attention_shapes(), **moe_shapes(self.dim, self.moe)}

    def block_products(self, number: int) -> float:
        """Return how many of block `number`'s weights multiply each token."""
        return self.attention_products + self.moe.products(self.dim)

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `MixtralConfig` says of this model."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            **super().hf_config(),
            "sliding_window": None,
            "num_local_experts": self.moe.num_experts,
            "num_experts_per_tok": self.moe.experts_per_token,
            "intermediate_size": self.moe.expert_ffn_dim,
            "router_aux_loss_coef": self.moe.aux_weight,
        }

    def build(self, kernels: Kernels) -> Mixtral:
        """Return the module."""
        from .model import Mixtral

        return Mixtral(self, kernels)
