"""Llama 3's names. Torch-free."""

from ..layout import Layout

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    hf_names={
        "embed.weight": "model.embed_tokens.weight",
        "layers.{i}.attention.norm.weight": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
        "layers.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
        "layers.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
        "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.mlp.norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
        "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
        "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
        "head.norm.weight": "model.norm.weight",
        "head.proj.weight": "lm_head.weight",
    },
    hf_keys={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_dim",
        "vocab_size": "vocab_size",
        "rms_norm_eps": "norm_eps",
        "rope_parameters.rope_theta": "rope_theta",
        "rope_parameters.factor": "rope_scaling.factor",
        "rope_parameters.low_freq_factor": "rope_scaling.low_freq_factor",
        "rope_parameters.high_freq_factor": "rope_scaling.high_freq_factor",
        "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_seq_len",
    },
    hf_possible={
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_parameters.rope_type": ("default", "llama3"),
        "quantization_config": (None,),
    },
    hf_also={
        "max_position_embeddings": "max_seq_len",
        "tie_word_embeddings": "tie_embeddings",
    },
    hf_defaults={
        "num_key_value_heads": "num_attention_heads",
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters.rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
)
