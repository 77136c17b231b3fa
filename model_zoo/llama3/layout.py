"""Llama 3's names. Torch-free."""

from ..decoder_layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MLP_HF,
    MLP_TENSOR,
    SCALING_KEYS,
)
from ..layout import Layout

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **MLP_TENSOR},
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **MLP_HF},
    hf_keys={**HF_KEYS, **GROUPED_QUERY_KEYS, "intermediate_size": "ffn_dim", **SCALING_KEYS},
    hf_possible={
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_parameters.rope_type": ("default", "llama3"),
        "quantization_config": (None,),
    },
    hf_also=HF_ALSO,
    hf_defaults={
        "num_key_value_heads": "num_attention_heads",
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters.rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
)
