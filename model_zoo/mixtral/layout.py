"""Mixtral's names. Torch-free."""

from ..decoder_layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    EXPERTS_FORMS,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MOE_TENSOR,
)
from ..layout import Layout

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
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "intermediate_size": "moe.expert_ffn_dim",
    },
    hf_possible={
        "model_type": ("mixtral",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "sliding_window": (None,),
        "rope_parameters.rope_type": ("default",),
        "quantization_config": (None,),
    },
    hf_also={**HF_ALSO, "router_aux_loss_coef": "moe.aux_weight"},
    hf_defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_parameters.rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 1e-3,
    },
)
