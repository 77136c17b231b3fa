"""Llama 4's names. Torch-free."""

from ..decoder_layout import (
    ATTENTION_HF,
    ENDS_HF,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    SCALING_KEYS,
)
from ..layout import Layout

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
    pipeline=True,
    experts="mlp.experts",
    hf_names={**ENDS_HF, **ATTENTION_HF, **FEED_FORWARD_HF, **EXPERTS_HF},
    hf_forms={
        "layers.{i}.mlp.experts.gate_up": ("joined", "transposed"),
        "layers.{i}.mlp.experts.down": ("transposed",),
    },
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
    hf_possible={
        "model_type": ("llama4_text",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attn_temperature_tuning": (True, 4),
        "rope_parameters.rope_type": ("default", "llama3"),
        "quantization_config": (None,),
    },
    hf_follow=("layer_types", "moe_layers", "no_rope_layers"),
    hf_also=HF_ALSO,
    hf_defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters.rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "use_qk_norm": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
)
