"""Llama 3 as Meta publishes it: names, and sizes from params.json. Torch-free.

Source: `ModelArgs` and `FeedForward` in
https://github.com/meta-llama/llama-models/tree/main/models/llama3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..config import validate
from ..sizes import SettingsError, quote
from .config import Llama3Config

NAMES = {
    "embed.weight": "tok_embeddings.weight",
    "layers.{i}.attention.norm.weight": "layers.{i}.attention_norm.weight",
    "layers.{i}.attention.q.weight": "layers.{i}.attention.wq.weight",
    "layers.{i}.attention.k.weight": "layers.{i}.attention.wk.weight",
    "layers.{i}.attention.v.weight": "layers.{i}.attention.wv.weight",
    "layers.{i}.attention.o.weight": "layers.{i}.attention.wo.weight",
    "layers.{i}.mlp.norm.weight": "layers.{i}.ffn_norm.weight",
    "layers.{i}.mlp.gate.weight": "layers.{i}.feed_forward.w1.weight",
    "layers.{i}.mlp.up.weight": "layers.{i}.feed_forward.w3.weight",
    "layers.{i}.mlp.down.weight": "layers.{i}.feed_forward.w2.weight",
    "head.norm.weight": "norm.weight",
    "head.proj.weight": "output.weight",
}
ROTATED = ("attention.q.weight", "attention.k.weight")
"""endings of the weights whose rows Meta stores in interleaved rotary order"""
# A buffer in some of Meta's files, which our model computes instead.
COMPUTED = "rope.freqs"
NUMBERS: dict[str, type] = {
    "dim": int,
    "n_layers": int,
    "n_heads": int,
    "n_kv_heads": int,
    "vocab_size": int,
    "multiple_of": int,
    "ffn_dim_multiplier": float,
    "norm_eps": float,
    "rope_theta": float,
    "rope_scaling_factor": float,
}
LIMIT = 2**31


def config_from_params(params: Mapping[str, Any], vocab_rows: int) -> Llama3Config:
    """Return the config of a model that params.json describes.

    A rotary scaling without a factor is Llama 3.1's, unless the sizes are a flavor's that has
    another; and the two ends are one weight if that flavor's are.

    Args:
        vocab_rows: rows of the embedding, for files that leave them open.

    Raises:
        SettingsError: all that is missing or impossible.
    """
    values = _checked(params)
    dim, n_heads = values["dim"], values["n_heads"]
    vocab = values.get("vocab_size", -1)
    scaled = params.get("use_scaled_rope", False)
    sizes: dict[str, Any] = {
        "dim": dim,
        "n_layers": values["n_layers"],
        "n_heads": n_heads,
        "n_kv_heads": values.get("n_kv_heads", n_heads),
        "ffn_dim": _ffn_dim(values),
        "vocab_size": vocab if vocab > 0 else vocab_rows,
        "norm_eps": float(values.get("norm_eps", 1e-5)),
        "rope_theta": float(values.get("rope_theta", 10000.0)),
    }
    flavor = _flavor(sizes)
    if scaled:
        known = flavor.get("rope_scaling", {}).get("factor", 8.0)
        sizes["rope_scaling"] = {"factor": float(values.get("rope_scaling_factor", known))}
    # params.json does not say the context: 8,192 in Llama 3, 131,072 with the scaling of 3.1.
    sizes["max_seq_len"] = 131072 if scaled else 8192
    sizes["tie_embeddings"] = flavor.get("tie_embeddings", False)
    return cast("Llama3Config", validate(Llama3Config, sizes))


def _checked(params: Mapping[str, Any]) -> dict[str, Any]:
    problems = [
        f"params.json does not say {key}"
        for key in ("dim", "n_layers", "n_heads", "multiple_of")
        if params.get(key) is None
    ]
    values = {key: params[key] for key in NUMBERS if params.get(key) is not None}
    for key, value in values.items():
        kinds = (int, float) if NUMBERS[key] is float else (int,)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        # -1 leaves a size open: as many rows as the embedding has, as many key-value heads as
        # heads.
        is_open = key in ("vocab_size", "n_kv_heads") and value == -1
        if not is_number or not (0 < value < LIMIT or is_open):
            problems.append(f"params.json says {key} = {quote(value)}")
    if not isinstance(params.get("use_scaled_rope", False), bool):
        problems.append(f"params.json says use_scaled_rope = {quote(params['use_scaled_rope'])}")
    if "moe_args" in params or "quantization_args" in params:
        problems.append("params.json describes experts or quantized weights: not read")
    if problems:
        raise SettingsError(problems)
    if values.get("n_kv_heads") == -1:
        del values["n_kv_heads"]
    return values


def _ffn_dim(values: Mapping[str, Any]) -> int:
    # Rounded down twice and up once, in the order of Meta's `FeedForward`.
    width = int(2 * 4 * values["dim"] / 3)
    width = int(values.get("ffn_dim_multiplier", 1.0) * width)
    multiple = values["multiple_of"]
    return int(multiple * -(-width // multiple))


def _flavor(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the flavor that has these sizes, or nothing."""
    for flavor in Llama3Config.flavors.values():
        keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
        if all(flavor.get(key) == sizes[key] for key in keys):
            return flavor
    return {}
