"""Qwen3's names. Torch-free."""

from ..decoder_layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    EXPERTS_HF,
    EXPERTS_STACKS,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MLP_HF,
    MLP_TENSOR,
    QK_NORM_HF,
    QK_NORM_TENSOR,
)
from ..layout import Layout

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **QK_NORM_TENSOR, **MLP_TENSOR},
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **QK_NORM_HF, **MLP_HF, **EXPERTS_HF},
    hf_stacks=EXPERTS_STACKS,
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "intermediate_size": "ffn_dim",
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.experts_per_token",
        "moe_intermediate_size": "moe.expert_ffn_dim",
        "norm_topk_prob": "moe.normalize",
    },
    hf_possible={
        "model_type": ("qwen3", "qwen3_moe"),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "rope_parameters.rope_type": ("default",),
        "quantization_config": (None,),
    },
    hf_also={**HF_ALSO, "router_aux_loss_coef": "moe.aux_weight"},
    hf_defaults={
        "num_key_value_heads": "num_attention_heads",
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters.rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        # A model without experts says none of these.
        "num_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": None,
        "norm_topk_prob": None,
        "router_aux_loss_coef": None,
    },
)
