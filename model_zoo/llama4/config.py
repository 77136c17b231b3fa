"""Llama 4's sizes, from the config.json of its published models. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, model_validator

from ..grouped_query_config import GroupedQueryConfig
from ..layers.configs import MoESettings
from ..layers.rope_scaling import SCALING_KEYS, RopeScaling
from ..layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MLP_TENSOR,
    MOE_TENSOR,
    Layout,
)
from ..sizes import Size

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from .model import Llama4


FEED_FORWARD_HF = {
    "layers.{i}.mlp.norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.feed_forward.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.feed_forward.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.feed_forward.down_proj.weight",
}
EXPERTS_HF = {
    "layers.{i}.mlp.router.weight": "model.layers.{i}.feed_forward.router.weight",
    "layers.{i}.mlp.experts.gate_up": "model.layers.{i}.feed_forward.experts.gate_up_proj",
    "layers.{i}.mlp.experts.down": "model.layers.{i}.feed_forward.experts.down_proj",
    **{
        f"layers.{{i}}.mlp.shared.{word}.weight": (
            f"model.layers.{{i}}.feed_forward.shared_expert.{word}_proj.weight"
        )
        for word in ("gate", "up", "down")
    },
}

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **MLP_TENSOR, **MOE_TENSOR},
    context=True,
    pipeline=True,
    experts="mlp.experts",
    hf_names={**ENDS_HF, **ATTENTION_HF, **FEED_FORWARD_HF, **EXPERTS_HF},
    hf_forms={
        "layers.{i}.mlp.experts.gate_up": ("joined", "transposed"),
        "layers.{i}.mlp.experts.down": ("transposed",),
    },
    # transformers' class (5.23) does not say that its matrices are transposed.
    peft_swaps=True,
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "intermediate_size_mlp": "ffn_dim",
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "intermediate_size": "moe.expert_ffn_dim",
        "interleave_moe_layer_step": "moe_every",
        "attention_chunk_size": "chunk",
        "no_rope_layer_interval": "nope_every",
        "use_qk_norm": "qk_norm",
        "attn_scale": "temperature_scale",
        "floor_scale": "temperature_floor",
        **SCALING_KEYS,
    },
    hf_possible={"model_type": ("llama4_text",)},
    hf_follow=("layer_types", "moe_layers", "no_rope_layers"),
    hf_also=HF_ALSO,
)


PUBLISHED = {
    "dim": 5120,
    "n_layers": 48,
    "n_heads": 40,
    "n_kv_heads": 8,
    "head_dim": 128,
    "ffn_dim": 16384,
    "vocab_size": 202048,
    "rope_theta": 500000.0,
    "chunk": 8192,
    "temperature_floor": 8192,
}
FORM = {"num_shared": 1, "score": "sigmoid", "normalize": False}
ROUTING = {"experts_per_token": 1, **FORM}


class Llama4Config(GroupedQueryConfig):
    """Llama 4's text model: chunked attention with RoPE, every fourth block's without either."""

    layout: ClassVar = LAYOUT
    only_causal: ClassVar = "its chunks and the scale of its queries look back"
    hf_class: ClassVar = "Llama4"
    hf_heads: ClassVar = ()
    flavors: ClassVar = {
        "debug": {"moe": ROUTING},
        "17bx16e": {
            **PUBLISHED,
            "rope_scaling": {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
            "max_seq_len": 10485760,
            "moe": {**ROUTING, "num_experts": 16, "expert_ffn_dim": 8192},
            "moe_every": 1,
        },
        "17bx128e": {
            **PUBLISHED,
            "qk_norm": False,
            "max_seq_len": 1048576,
            "moe": {**ROUTING, "num_experts": 128, "expert_ffn_dim": 8192},
            "moe_every": 2,
        },
    }

    name: Literal["llama4"] = "llama4"
    ffn_dim: Size = 192
    """width inside the feed-forward layer of blocks without experts"""
    moe: MoESettings = MoESettings.model_validate(ROUTING)
    """experts of the other blocks"""
    moe_every: Size = 2
    """one block in every `moe_every` has experts"""
    rope_scaling: RopeScaling | None = None
    """stretching of the rotary frequencies; none leaves them alone"""
    chunk: Size = 64
    """in blocks with RoPE a position sees those of its own chunk of so many"""
    nope_every: Size = 4
    """one block in every `nope_every` has no RoPE and attends to the whole row"""
    qk_norm: bool = True
    """normalise queries and keys after RoPE"""
    temperature_scale: NonNegativeFloat = 0.1
    """in blocks without RoPE queries are multiplied by 1 + this * log(1 + steps)"""
    temperature_floor: Size = 64
    """positions a step"""

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys have norms, which bound the scores of attention."""
        return self.qk_norm

    def has_rotary(self, number: int) -> bool:
        """Return whether block `number` is one with RoPE."""
        return (number + 1) % self.nope_every != 0

    def experts_of(self, number: int) -> MoESettings | None:
        """Return the experts of block `number`, or None where it has none."""
        return self.moe if (number + 1) % self.moe_every == 0 else None

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        self.moe.require(**FORM, shared_ffn_dim=None, scale=1.0, groups=1)
        return self

    def attention_multiplications(self, number: int, seq_len: int) -> float:
        """Return the multiplications a token of scores and weighted values in a block's chunks."""
        reach = min(self.chunk, seq_len) if self.has_rotary(number) else seq_len
        return super().attention_multiplications(number, reach)

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Llama4TextConfig` says of this model."""
        rotary = [self.has_rotary(number) for number in range(self.n_layers)]
        return {
            "model_type": "llama4_text",
            **super().hf_config(),
            "intermediate_size_mlp": self.ffn_dim,
            "attention_chunk_size": self.chunk,
            "no_rope_layer_interval": self.nope_every,
            "no_rope_layers": list(map(int, rotary)),
            "layer_types": [
                f"{'chunked' if has_rotary else 'full'}_attention" for has_rotary in rotary
            ],
            "use_qk_norm": self.qk_norm,
            "attn_temperature_tuning": True,
            "attn_scale": self.temperature_scale,
            "floor_scale": self.temperature_floor,
            "moe_layers": [n for n in range(self.n_layers) if self.experts_of(n)],
            "interleave_moe_layer_step": self.moe_every,
            "num_local_experts": self.moe.num_experts,
            "num_experts_per_tok": self.moe.experts_per_token,
            "intermediate_size": self.moe.expert_ffn_dim,
        }

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        flat = super().flatten_hf(settings)
        if not flat.get("no_rope_layers"):  # published as []: made of no_rope_layer_interval
            flat.pop("no_rope_layers", None)
        return flat

    def build(self, kernels: Kernels) -> Llama4:
        """Return the module."""
        from .model import Llama4

        return Llama4(self, kernels)
