"""DeepSeek-V3's names. Torch-free."""

from ..layers.rope_scaling import YARN_KEYS
from ..layout import (
    ENDS_HF,
    ENDS_TENSOR,
    EXPERTS_FORMS,
    EXPERTS_HF,
    EXPERTS_STACKS,
    HF_ALSO,
    HF_KEYS,
    MLP_HF,
    MLP_TENSOR,
    MOE_TENSOR,
    Layout,
)

# The latents are computed by each tensor rank: they are narrow, and all heads need them.
LATENT_TENSOR = {
    "layers.{i}.attention.norm.weight": "norm",
    "layers.{i}.attention.q.weight": "columns",
    "layers.{i}.attention.q_down.weight": "whole",
    "layers.{i}.attention.q_norm.weight": "whole",
    "layers.{i}.attention.q_up.weight": "columns",
    "layers.{i}.attention.kv_down.weight": "whole",
    "layers.{i}.attention.kv_norm.weight": "whole",
    "layers.{i}.attention.kv_up.weight": "columns",
    "layers.{i}.attention.o.weight": "rows",
}
LATENT_HF = {
    "layers.{i}.attention.norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.q_down.weight": "model.layers.{i}.self_attn.q_a_proj.weight",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_a_layernorm.weight",
    "layers.{i}.attention.q_up.weight": "model.layers.{i}.self_attn.q_b_proj.weight",
    "layers.{i}.attention.kv_down.weight": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "layers.{i}.attention.kv_norm.weight": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
    "layers.{i}.attention.kv_up.weight": "model.layers.{i}.self_attn.kv_b_proj.weight",
    "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
}
MOE_HF = {
    **EXPERTS_HF,
    "layers.{i}.mlp.router.bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
    "layers.{i}.mlp.shared.gate.weight": "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
    "layers.{i}.mlp.shared.up.weight": "model.layers.{i}.mlp.shared_experts.up_proj.weight",
    "layers.{i}.mlp.shared.down.weight": "model.layers.{i}.mlp.shared_experts.down_proj.weight",
}
# Blocks of further predictions join what their rank holds of the sequence, and the loss takes all.
PREDICTION_TENSOR = {
    "layers.{i}.embed_norm.weight": "whole",
    "layers.{i}.hidden_norm.weight": "whole",
    "layers.{i}.join.weight": "whole",
    "layers.{i}.norm.weight": "norm",
}
PREDICTION_HF = {
    "layers.{i}.embed_norm.weight": "model.layers.{i}.enorm.weight",
    "layers.{i}.hidden_norm.weight": "model.layers.{i}.hnorm.weight",
    "layers.{i}.join.weight": "model.layers.{i}.eh_proj.weight",
    "layers.{i}.norm.weight": "model.layers.{i}.shared_head.norm.weight",
}

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **LATENT_TENSOR, **MLP_TENSOR, **MOE_TENSOR, **PREDICTION_TENSOR},
    experts="mlp.experts",
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **LATENT_HF, **MLP_HF, **MOE_HF, **PREDICTION_HF},
    hf_stacks=EXPERTS_STACKS,
    hf_forms=EXPERTS_FORMS,
    # Published folders repeat the embedding and the head in the layers of multi-token prediction.
    hf_copies=(".embed_tokens.weight", ".shared_head.head.weight"),
    hf_keys={
        **HF_KEYS,
        "intermediate_size": "ffn_dim",
        "first_k_dense_replace": "n_dense_layers",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "nope_head_dim",
        "qk_rope_head_dim": "rope_head_dim",
        "v_head_dim": "value_head_dim",
        "n_routed_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "moe_intermediate_size": "moe.expert_ffn_dim",
        "n_shared_experts": "moe.num_shared",
        "norm_topk_prob": "moe.normalize",
        "routed_scaling_factor": "moe.scale",
        "n_group": "moe.groups",
        "topk_group": "moe.groups_per_token",
        "scoring_func": "moe.score",
        **YARN_KEYS,
    },
    hf_possible={"model_type": ("deepseek_v3", "deepseek_v2")},
    hf_follow=("num_key_value_heads",),
    hf_also={
        **HF_ALSO,
        "num_nextn_predict_layers": "mtp_depth",
        "aux_loss_alpha": "moe.aux_weight",
        "initializer_range": "init_std",
    },
)
