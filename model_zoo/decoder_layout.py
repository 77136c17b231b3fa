"""Names that decoders share, to be put together to a family's `Layout`. Torch-free."""

ENDS_TENSOR = {
    "embed.weight": "vocabulary",
    "head.norm.weight": "norm",
    "head.proj.weight": "columns",
}
ATTENTION_TENSOR = {
    "layers.{i}.attention.norm.weight": "norm",
    "layers.{i}.attention.q.weight": "columns",
    "layers.{i}.attention.k.weight": "key_value",
    "layers.{i}.attention.v.weight": "key_value",
    "layers.{i}.attention.o.weight": "rows",
}
QK_NORM_TENSOR = {
    "layers.{i}.attention.q_norm.weight": "whole",
    "layers.{i}.attention.k_norm.weight": "whole",
}
MLP_TENSOR = {
    "layers.{i}.mlp.norm.weight": "norm",
    "layers.{i}.mlp.gate.weight": "columns",
    "layers.{i}.mlp.up.weight": "columns",
    "layers.{i}.mlp.down.weight": "rows",
}
MOE_TENSOR = {
    "layers.{i}.mlp.norm.weight": "norm",
    "layers.{i}.mlp.router.weight": "whole",
    "layers.{i}.mlp.shared.gate.weight": "whole",
    "layers.{i}.mlp.shared.up.weight": "whole",
    "layers.{i}.mlp.shared.down.weight": "whole",
}
ENDS_HF = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.proj.weight": "lm_head.weight",
}
ATTENTION_HF = {
    "layers.{i}.attention.norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
}
QK_NORM_HF = {
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
}
MLP_HF = {
    "layers.{i}.mlp.norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
}
EXPERTS_HF = {
    "layers.{i}.mlp.router.weight": "model.layers.{i}.mlp.gate.weight",
    "layers.{i}.mlp.experts.gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "layers.{i}.mlp.experts.down": "model.layers.{i}.mlp.experts.down_proj",
}
EXPERTS_STACKS = {
    "layers.{i}.mlp.experts.gate_up": (
        "model.layers.{i}.mlp.experts.{j}.gate_proj.weight",
        "model.layers.{i}.mlp.experts.{j}.up_proj.weight",
    ),
    "layers.{i}.mlp.experts.down": ("model.layers.{i}.mlp.experts.{j}.down_proj.weight",),
}
"""as models are published, and as transformers saves them"""
EXPERTS_FORMS = {"layers.{i}.mlp.experts.gate_up": ("joined",)}
"""where all experts are in one tensor"""
HF_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_parameters.rope_theta": "rope_theta",
}
GROUPED_QUERY_KEYS = {"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"}
SCALING_KEYS = {
    "rope_parameters.factor": "rope_scaling.factor",
    "rope_parameters.low_freq_factor": "rope_scaling.low_freq_factor",
    "rope_parameters.high_freq_factor": "rope_scaling.high_freq_factor",
    "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_seq_len",
}
"""of `layers.rotary_config.RopeScaling`"""
YARN_KEYS = {
    "rope_parameters.factor": "rope_scaling.factor",
    "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_seq_len",
    "rope_parameters.beta_fast": "rope_scaling.beta_fast",
    "rope_parameters.beta_slow": "rope_scaling.beta_slow",
    "rope_parameters.truncate": "rope_scaling.truncate",
    "rope_parameters.mscale": "rope_scaling.mscale",
    "rope_parameters.mscale_all_dim": "rope_scaling.mscale_all_dim",
}
"""of `layers.rotary_config.YarnScaling`"""
HF_ALSO = {
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
}
