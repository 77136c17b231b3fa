"""Llama 4's text model as Meta publishes it: names, and sizes from params.json. Torch-free.

Source: `ModelArgs` and the hooks that load weights in
https://github.com/meta-llama/llama-models/tree/main/models/llama4
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..config import validate
from ..llama3.meta import NAMES as LLAMA3_NAMES
from ..sizes import SettingsError, quote
from .config import Llama4Config

BLOCK = "layers.{i}."
NAMES = LLAMA3_NAMES | {
    BLOCK + "mlp.router.weight": BLOCK + "feed_forward.router_DE",
    BLOCK + "mlp.experts.gate_up": BLOCK + "feed_forward.experts.w1",
    BLOCK + "mlp.experts.down": BLOCK + "feed_forward.experts.w2",
    BLOCK + "mlp.shared.gate.weight": BLOCK + "feed_forward.shared_expert.w1.weight",
    BLOCK + "mlp.shared.up.weight": BLOCK + "feed_forward.shared_expert.w3.weight",
    BLOCK + "mlp.shared.down.weight": BLOCK + "feed_forward.shared_expert.w2.weight",
}
RENAMED = {
    "attention.wqkv.layer_norm_weight": "attention_norm.weight",
    "feed_forward.mlp.layer_norm_weight": "ffn_norm.weight",
    "feed_forward.norm.weight": "ffn_norm.weight",
    "feed_forward.mlp.fc2_weight": "feed_forward.w2.weight",
    "feed_forward.w_in_shared_FD.weight": "feed_forward.shared_expert.w1.weight",
    "feed_forward.w_swiglu_FD.weight": "feed_forward.shared_expert.w3.weight",
    "feed_forward.w_out_shared_DF.weight": "feed_forward.shared_expert.w2.weight",
    "feed_forward.experts.moe_w_in_eD_F": "feed_forward.experts.w1",
    "feed_forward.experts.moe_w_swiglu_eD_F": "feed_forward.experts.w3",
    "feed_forward.experts.moe_w_out_eF_D": "feed_forward.experts.w2",
}
"""endings of published names -> those of Meta's modules"""
LEFT = ("vision_", "rope.freqs", "freq_cis", "freqs_cis")
LEFT_ENDINGS = ("gate_stats_3E", "expert_activation_DE", "_extra_state")
"""tensors that are not of the text model, or that training alone needed"""
POSITIONS = {16: 10485760}
"""experts -> the positions of the published model; of others 1,048,576"""


def config_from_params(
    params: Mapping[str, Any], vocab_rows: int, expert_width: int, dense_width: int
) -> Llama4Config:
    """Return the config of a model that params.json describes.

    Args:
        params: its content.
        vocab_rows: rows of the embedding.
        expert_width: width inside an expert, as the weights have it.
        dense_width: width of blocks without experts; 0: there are none.

    Raises:
        SettingsError: all that is missing or impossible.
    """
    moe = params["moe_args"] if isinstance(params["moe_args"], dict) else {}
    problems = [
        f"params.json does not say {key}"
        for key, table in (
            *((key, params) for key in ("dim", "n_layers", "n_heads", "n_kv_heads")),
            ("num_experts", moe),
        )
        if type(table.get(key)) is not int
    ]
    if params.get("quantization_args") or params.get("lora_args"):
        problems.append("params.json describes quantized or adapted weights: not read")
    if problems:
        raise SettingsError(problems)
    n_layers = params["n_layers"]
    max_seq_len = POSITIONS.get(moe["num_experts"], 1048576)
    sizes: dict[str, Any] = {
        "dim": params["dim"],
        "n_layers": n_layers,
        "n_heads": params["n_heads"],
        "n_kv_heads": params["n_kv_heads"],
        "head_dim": params.get("head_dim") or params["dim"] // max(1, params["n_heads"]),
        "vocab_size": vocab_rows,
        "norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta", 500000.0),
        "max_seq_len": max_seq_len,
        "chunk": params.get("attention_chunk_size") or max_seq_len,
        "nope_every": params.get("nope_layer_interval") or n_layers + 1,
        "qk_norm": params.get("use_qk_norm", False),
        "temperature_scale": params.get("attn_scale", 0.1),
        "temperature_floor": params.get("floor_scale", 8192.0),
        "moe_every": moe.get("interleave_moe_layer_step", 1),
        "moe": {
            "num_experts": moe["num_experts"],
            "experts_per_token": moe.get("top_k", 1),
            "expert_ffn_dim": expert_width,
            "num_shared": 1,
            "score": "sigmoid",
            "normalize": False,
        },
    }
    if dense_width:
        sizes["ffn_dim"] = dense_width
    floor = sizes["temperature_floor"]
    if floor != int(floor):
        raise SettingsError([f"params.json says floor_scale = {quote(floor)}"])
    sizes["temperature_floor"] = int(floor)
    if not params.get("attn_temperature_tuning", False):
        sizes["temperature_scale"] = 0.0
    if params.get("use_scaled_rope", False):
        # What Meta's code takes where params.json says nothing.
        sizes["rope_scaling"] = {
            "factor": params.get("rope_scaling_factor") or 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": params.get("rope_high_freq_factor") or 1.0,
        }
    return cast("Llama4Config", validate(Llama4Config, sizes))
