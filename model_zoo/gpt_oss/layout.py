"""gpt-oss's names. Torch-free."""

from ..decoder_layout import ATTENTION_HF, ENDS_HF, GROUPED_QUERY_KEYS, HF_ALSO, HF_KEYS, YARN_KEYS
from ..layout import Layout

BIASES_HF = {
    name.replace("weight", "bias"): theirs.replace("weight", "bias")
    for name, theirs in ATTENTION_HF.items()
    if "norm" not in name
}
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
    context=True,
    ring=False,
    pipeline=True,
    experts="mlp.experts",
    hf_names={
        **ENDS_HF,
        **ATTENTION_HF,
        **BIASES_HF,
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
    hf_possible={
        "model_type": ("gpt_oss",),
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "rope_parameters.rope_type": ("default", "yarn"),
        "quantization_config": (None,),
    },
    hf_follow=("layer_types",),
    hf_also=HF_ALSO,
    hf_defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters.rope_theta": 150000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
)
