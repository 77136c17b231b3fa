"""gpt-oss's sizes (OpenAI 2025, arXiv:2508.10925, section 2). Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..grouped_query_config import GroupedQueryConfig
from ..layers.configs import MoESettings
from ..layers.rope_scaling import YARN_KEYS, YarnScaling
from ..layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MOE_TENSOR,
    QKV_BIASES_HF,
    QKV_BIASES_TENSOR,
    Layout,
)
from ..sizes import PositiveFloat, Size

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from .model import GptOss


EXPERTS_HF = {
    "layers.{i}.mlp.norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.router.weight": "model.layers.{i}.mlp.router.weight",
    "layers.{i}.mlp.router.logit_bias": "model.layers.{i}.mlp.router.bias",
    "layers.{i}.mlp.experts.gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "layers.{i}.mlp.experts.gate_up_bias": "model.layers.{i}.mlp.experts.gate_up_proj_bias",
    "layers.{i}.mlp.experts.down": "model.layers.{i}.mlp.experts.down_proj",
    "layers.{i}.mlp.experts.down_bias": "model.layers.{i}.mlp.experts.down_proj_bias",
}

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={
        **ENDS_TENSOR,
        **ATTENTION_TENSOR,
        **QKV_BIASES_TENSOR,
        "layers.{i}.attention.o.bias": "rows",
        "layers.{i}.attention.sinks": "heads",
        **MOE_TENSOR,
        "layers.{i}.mlp.router.logit_bias": "whole",
    },
    context=True,
    pipeline=True,
    experts="mlp.experts",
    hf_names={
        **ENDS_HF,
        **ATTENTION_HF,
        **QKV_BIASES_HF,
        "layers.{i}.attention.o.bias": "model.layers.{i}.self_attn.o_proj.bias",
        "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
        **EXPERTS_HF,
    },
    hf_forms={
        "layers.{i}.mlp.experts.gate_up": ("interleaved", "transposed"),
        "layers.{i}.mlp.experts.gate_up_bias": ("interleaved",),
        "layers.{i}.mlp.experts.down": ("transposed",),
    },
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "sliding_window": "window",
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "intermediate_size": "moe.expert_ffn_dim",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
        **YARN_KEYS,
    },
    hf_possible={"model_type": ("gpt_oss",)},
    hf_follow=("layer_types",),
    hf_also=HF_ALSO,
)


PUBLISHED = {
    "dim": 2880,
    "n_heads": 64,
    "n_kv_heads": 8,
    "head_dim": 64,
    "window": 128,
    "vocab_size": 201088,
    "rope_theta": 150000.0,
    "rope_scaling": {"factor": 32.0, "truncate": False},
    "max_seq_len": 131072,
}
# gpt-oss takes the softmax over the chosen experts alone: the softmax over all, normalised.
FORM = {"num_shared": 0, "score": "softmax", "normalize": True}
EXPERTS = {**FORM, "experts_per_token": 4, "expert_ffn_dim": 2880}


class GptOssConfig(GroupedQueryConfig):
    """gpt-oss: attention with sinks, every other block's in a window, and experts with biases."""

    layout: ClassVar = LAYOUT
    biases: ClassVar = "qkvo"
    hf_class: ClassVar = "GptOss"
    hf_heads: ClassVar = ("sequence_classification", "token_classification")
    flavors: ClassVar = {
        "debug": {"moe": FORM},
        "20b": {**PUBLISHED, "n_layers": 24, "moe": {**EXPERTS, "num_experts": 32}},
        "120b": {**PUBLISHED, "n_layers": 36, "moe": {**EXPERTS, "num_experts": 128}},
    }

    name: Literal["gpt_oss"] = "gpt_oss"
    window: Size = 64
    """positions that a block with a window sees, its own the last"""
    full_every: Size = 2
    """one block in every `full_every` attends to the whole row"""
    moe: MoESettings = MoESettings.model_validate(FORM)
    """experts of every block"""
    rope_scaling: YarnScaling | None = None
    """stretching of the rotary frequencies; none leaves them alone"""
    swiglu_limit: PositiveFloat = 7.0
    """experts' gates are cut off above this, and what they gate above and below"""
    swiglu_alpha: PositiveFloat = 1.702
    """a gate's sigmoid is of this times the gate"""

    def window_of(self, number: int) -> int | None:
        """Return how many positions block `number` sees; None: the whole row."""
        return self.window if (number + 1) % self.full_every else None

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        self.moe.require(**FORM, scale=1.0, groups=1)
        if self.rope_scaling and (self.rope_scaling.mscale or self.rope_scaling.mscale_all_dim):
            raise ValueError("rope_scaling.mscale and mscale_all_dim are of latent attention")
        return self

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the parameters of a block's attention."""
        return {"attention.sinks": (self.n_heads,), **super().attention_shapes()}

    def block_shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of a block's parameters."""
        experts, ffn_dim = self.moe.num_experts, self.moe.expert_ffn_dim
        shapes = super().block_shapes(number)
        # In the module's order: the router's bias comes before the experts' weights, theirs after.
        gate_up, down = shapes.pop("mlp.experts.gate_up"), shapes.pop("mlp.experts.down")
        return {
            **shapes,
            "mlp.router.logit_bias": (experts,),
            "mlp.experts.gate_up": gate_up,
            "mlp.experts.down": down,
            "mlp.experts.gate_up_bias": (experts, 2, ffn_dim),
            "mlp.experts.down_bias": (experts, self.dim),
        }

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `GptOssConfig` says of this model."""
        words = ("full_attention", "sliding_attention")
        return {
            "model_type": "gpt_oss",
            **super().hf_config(),
            "attention_bias": True,
            "sliding_window": self.window,
            "layer_types": [
                words[self.window_of(number) is not None] for number in range(self.n_layers)
            ],
            "num_local_experts": self.moe.num_experts,
            "num_experts_per_tok": self.moe.experts_per_token,
            "intermediate_size": self.moe.expert_ffn_dim,
            "swiglu_limit": self.swiglu_limit,
            "swiglu_alpha": self.swiglu_alpha,
        }

    def build(self, kernels: Kernels) -> GptOss:
        """Return the module."""
        from .model import GptOss

        return GptOss(self, kernels)
