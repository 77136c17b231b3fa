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
)
