"""Names and keys of GGUF for the families that are read and written. Torch-free.

Sources: `gguf-py/gguf/tensor_mapping.py` and `constants.py` in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...model_zoo.config import ModelConfig
from ...model_zoo.layout import translate
from ...model_zoo.sizes import SettingsError, quote

FAMILIES = {
    "llama": "llama3",
    "olmo2": "olmo2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3",
}
"""`general.architecture` -> our family"""
WITH_EXPERTS = {"llama": "mixtral", "qwen3moe": "qwen3"}
"""the same where the file says that there are experts"""
WITHOUT_WINDOWS = {"mistral": "llama"}
"""our family -> the architecture that computes the same where no block has a window"""
INTERLEAVED = {"llama": ("attention.q.weight", "attention.k.weight")}
"""weights of queries and keys that an architecture has in interleaved pairs, as Meta has them"""
ROPE_FACTORS = "rope_freqs.weight"
"""what rotary frequencies are divided by, where they are scaled"""
NAMES = {
    "embed.weight": "token_embd.weight",
    "head.norm.weight": "output_norm.weight",
    "head.proj.weight": "output.weight",
    "layers.{i}.attention.norm.weight": "blk.{i}.attn_norm.weight",
    "layers.{i}.attention.q.weight": "blk.{i}.attn_q.weight",
    "layers.{i}.attention.k.weight": "blk.{i}.attn_k.weight",
    "layers.{i}.attention.v.weight": "blk.{i}.attn_v.weight",
    "layers.{i}.attention.q.bias": "blk.{i}.attn_q.bias",
    "layers.{i}.attention.k.bias": "blk.{i}.attn_k.bias",
    "layers.{i}.attention.v.bias": "blk.{i}.attn_v.bias",
    "layers.{i}.attention.o.weight": "blk.{i}.attn_output.weight",
    "layers.{i}.attention.post_norm.weight": "blk.{i}.post_attention_norm.weight",
    "layers.{i}.attention.q_norm.weight": "blk.{i}.attn_q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "blk.{i}.attn_k_norm.weight",
    "layers.{i}.mlp.norm.weight": "blk.{i}.ffn_norm.weight",
    "layers.{i}.mlp.post_norm.weight": "blk.{i}.post_ffw_norm.weight",
    "layers.{i}.mlp.gate.weight": "blk.{i}.ffn_gate.weight",
    "layers.{i}.mlp.up.weight": "blk.{i}.ffn_up.weight",
    "layers.{i}.mlp.down.weight": "blk.{i}.ffn_down.weight",
    "layers.{i}.mlp.router.weight": "blk.{i}.ffn_gate_inp.weight",
    "layers.{i}.mlp.experts.gate_up": "blk.{i}.ffn_gate_exps.weight",
    "layers.{i}.mlp.experts.down": "blk.{i}.ffn_down_exps.weight",
}
KEYS = {
    "block_count": "n_layers",
    "context_length": "max_seq_len",
    "embedding_length": "dim",
    "feed_forward_length": "ffn_dim",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.freq_base": "rope_theta",
}
EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "experts_per_token",
    "expert_feed_forward_length": "expert_ffn_dim",
}
"""keys of `model.moe`"""
OPTIONAL = {"attention.head_count_kv": "attention.head_count", "attention.key_length": None}
"""keys that may be left out, and the key whose value they have then"""
ORIGINAL = "rope.scaling.original_context_length"
HARMLESS = ("vocab_size", ORIGINAL)


def gguf_name(name: str) -> str:
    """Return GGUF's name of our parameter; ours where there is none."""
    return translate(name, NAMES) or name


def gguf_parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the tensors in which GGUF stores our parameter.

    Args:
        name: our name.
        shape: the shape of our parameter; gate and up of experts are apart in GGUF.
    """
    first = gguf_name(name)
    if not name.endswith("experts.gate_up"):
        return [(first, shape)]
    part = (shape[0], *shape[2:])
    return [(first, part), (first.replace("gate", "up"), part)]


def architecture_of(config: ModelConfig) -> str:
    """Return GGUF's name of a model's architecture; empty: there is none that is written."""
    families = FAMILIES if getattr(config, "moe", None) is None else WITH_EXPERTS
    own = next((name for name, ours in families.items() if ours == config.name), "")
    return own or WITHOUT_WINDOWS.get(config.name, "")


def is_interleaved(name: str, architecture: str) -> bool:
    """Return whether GGUF has the pairs of our parameter's rows in another order."""
    return name.endswith(INTERLEAVED.get(architecture, ()) or "\0")


def read_sizes(metadata: Mapping[str, Any], family: str = "") -> dict[str, Any]:
    """Return the values of `[model]` that the keys of a GGUF file say.

    Args:
        metadata: the keys and values of the file.
        family: the family to read the model as, where several compute what the architecture does.

    Raises:
        SettingsError: a size is missing, or a key changes numbers in a way that is not done here.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise SettingsError([f"the architecture is {quote(architecture)}; {known} are read"])
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    has_experts = bool(own.get("expert_count"))
    sizes: dict[str, Any] = {"name": FAMILIES[architecture]}
    problems = []
    keys = dict(KEYS)
    if has_experts:
        name = WITH_EXPERTS.get(architecture, "")
        if not name:
            problems.append(f"experts of {quote(architecture)} are not read")
        sizes |= {"name": name, "moe": _read_experts(own, prefix, problems)}
        if name == "mixtral":
            del keys["feed_forward_length"]  # the width of an expert
    for key, ours in keys.items():
        value = own.get(key, own.get(OPTIONAL.get(key) or ""))
        if value is not None:
            # Stored in fp32: seven digits are what was meant.
            sizes[ours] = float(f"{value:.7g}") if isinstance(value, float) else value
        elif key not in OPTIONAL:
            problems.append(f"the file does not say {prefix}{key}")
    width = own.get("attention.key_length") or (
        own.get("embedding_length", 0) // max(1, own.get("attention.head_count", 1))
    )
    possible = {
        "rope.dimension_count": width,
        "attention.value_length": width,
        "rope.scaling.type": "none",
        **({} if has_experts else {"expert_count": 0, "expert_used_count": 0}),
        "attention.causal": True,
    }
    for key, value in own.items():
        if has_experts and key in EXPERT_KEYS:
            continue
        if key not in (*KEYS, *HARMLESS) and (key not in possible or value != possible[key]):
            problems.append(f"the file says {prefix}{key} = {quote(value)}, which is not done here")
    if problems:
        raise SettingsError(problems)
    if WITHOUT_WINDOWS.get(family) == architecture and not has_experts:
        sizes["name"] = family
    return sizes


def _read_experts(own: Mapping[str, Any], prefix: str, problems: list[str]) -> dict[str, Any]:
    """Return the values of `[model.moe]`; what is missing is added to `problems`."""
    sizes = {}
    for key, ours in EXPERT_KEYS.items():
        # Mixtral's files say the width of an expert where others say that of a dense layer.
        is_width = key == "expert_feed_forward_length"
        value = own.get(key, own.get("feed_forward_length") if is_width else None)
        if value is None:
            problems.append(f"the file does not say {prefix}{key}")
        sizes[ours] = value
    return sizes


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a GGUF file that describe a model.

    Raises:
        ValueError: GGUF's architectures that are written are not this model.
    """
    architecture, moe = architecture_of(config), getattr(config, "moe", None)
    if not architecture:
        families = (*FAMILIES.values(), *WITH_EXPERTS.values(), *WITHOUT_WINDOWS)
        known = ", ".join(dict.fromkeys(families))
        raise ValueError(f"{known} are written")
    if config.task_head or getattr(config, "is_bidirectional", False):
        raise ValueError("causal language models are written")
    window = getattr(config, "window", None)
    length = getattr(config, "max_seq_len", 0)
    if window is not None and window < length:
        raise ValueError(
            f"llama.cpp's {architecture!r} has no windows, and model.window is {window}, "
            f"less than model.max_seq_len ({length})"
        )
    if moe is not None:
        # llama.cpp always divides the weights of a token's experts by their sum.
        moe.require(normalize=True, balance_bias=False)
    found: dict[str, Any] = {"general.architecture": architecture}
    width = getattr(config, "head_width", 0)
    for key, ours in KEYS.items():
        value = width if ours == "head_dim" else getattr(config, ours, None)
        if value is None and moe is not None:
            value = moe.expert_ffn_dim
        found[f"{architecture}.{key}"] = value
    if moe is not None:
        for key, ours in EXPERT_KEYS.items():
            found[f"{architecture}.{key}"] = getattr(moe, ours)
    found |= {
        f"{architecture}.attention.value_length": width,
        f"{architecture}.rope.dimension_count": width,
        f"{architecture}.vocab_size": config.vocab,
    }
    scaling = getattr(config, "rope_scaling", None)
    if scaling is not None:
        found[f"{architecture}.{ORIGINAL}"] = scaling.original_max_seq_len
    return found
