"""Llama as Meta wrote it: rotary embeddings as complex numbers, cut as fairscale cuts.

Written after https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 320,
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
FFN = 112  # int(1.3 * int(8 * 32 / 3)) = 110, rounded up to 16
BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output", "tok_embeddings")
BY_COLUMNS = ("wo", "w2")


def weights(params: dict[str, Any], ffn: int = FFN) -> dict[str, Tensor]:
    """Return random weights by Meta's names."""
    dim, width = params["dim"], params["dim"] // params["n_heads"]
    kv = params["n_kv_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (params["vocab_size"], dim),
        "norm.weight": (dim,),
        "output.weight": (params["vocab_size"], dim),
    }
    for i in range(params["n_layers"]):
        shapes |= {
            f"layers.{i}.attention.wq.weight": (dim, dim),
            f"layers.{i}.attention.wk.weight": (kv, dim),
            f"layers.{i}.attention.wv.weight": (kv, dim),
            f"layers.{i}.attention.wo.weight": (dim, dim),
            f"layers.{i}.feed_forward.w1.weight": (ffn, dim),
            f"layers.{i}.feed_forward.w2.weight": (dim, ffn),
            f"layers.{i}.feed_forward.w3.weight": (ffn, dim),
            f"layers.{i}.attention_norm.weight": (dim,),
            f"layers.{i}.ffn_norm.weight": (dim,),
        }
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(folder: Path, tensors: dict[str, Tensor], params: dict[str, Any], count: int = 1) -> Path:
    """Write params.json and consolidated files, cut for `count` GPUs."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for number in range(count):
        part = {}
        for name, tensor in tensors.items():
            kind = name.split(".")[-2]
            if kind in BY_ROWS + BY_COLUMNS:
                tensor = tensor.chunk(count, dim=1 if kind in BY_COLUMNS else 0)[number].clone()
            part[name] = tensor
        part["rope.freqs"] = torch.ones(4)
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    return folder


def logits(tensors: dict[str, Tensor], params: dict[str, Any], tokens: Tensor) -> Tensor:
    """Return [B, S, V]."""
    x = tensors["tok_embeddings.weight"][tokens]
    turns = _turns(params, tokens.shape[1])
    for i in range(params["n_layers"]):
        block = {n.split(".", 2)[2]: t for n, t in tensors.items() if n.startswith(f"layers.{i}.")}
        normed = _norm(x, block["attention_norm.weight"], params)
        x = x + _attention(normed, block, params, turns)
        normed = _norm(x, block["ffn_norm.weight"], params)
        gate = F.silu(normed @ block["feed_forward.w1.weight"].T)
        up = normed @ block["feed_forward.w3.weight"].T
        x = x + (gate * up) @ block["feed_forward.w2.weight"].T
    return _norm(x, tensors["norm.weight"], params) @ tensors["output.weight"].T


def _norm(x: Tensor, weight: Tensor, params: dict[str, Any]) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weight


def _turns(params: dict[str, Any], length: int) -> Tensor:
    width = params["dim"] // params["n_heads"]
    frequencies = 1.0 / params["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    if params.get("use_scaled_rope"):
        frequencies = torch.tensor([_scaled(float(each)) for each in frequencies])
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(frequency: float) -> float:
    factor, low, high, context = 8, 1, 4, 8192
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _attention(
    x: Tensor, block: dict[str, Tensor], params: dict[str, Any], turns: Tensor
) -> Tensor:
    batch, length, dim = x.shape
    heads, groups = params["n_heads"], params["n_kv_heads"]
    width = dim // heads

    def split(name: str, count: int) -> Tensor:
        return (x @ block[f"attention.{name}.weight"].T).view(batch, length, count, width)

    def rotate(each: Tensor) -> Tensor:
        pairs = torch.view_as_complex(each.reshape(*each.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    q, k, v = rotate(split("wq", heads)), rotate(split("wk", groups)), split("wv", groups)
    k, v = (each.repeat_interleave(heads // groups, dim=2) for each in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    return out.transpose(1, 2).reshape(batch, length, dim) @ block["attention.wo.weight"].T
