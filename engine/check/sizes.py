"""Shrinks the sizes of a model and keeps its structure. Torch-free."""

from __future__ import annotations

from math import lcm
from typing import Any

from ...model_zoo.config import ModelConfig
from ..parallel.mesh import Degrees

WIDTH = 8
"""width of a head, which other widths follow"""
VOCABULARY = 320
"""more than the tokens of the byte tokenizer"""


def round_up(least: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not under `least`."""
    return -(-least // unit) * unit


def shrink_model(
    model: ModelConfig,
    given: Degrees,
    degrees: Degrees,
    *,
    lengths: tuple[int, int],
    stages: int,
    unit: int = 1,
) -> ModelConfig:
    """Return a small model of the same structure.

    Kinds of blocks, shared key-value heads, windows, expert groups, further predictions and tied
    weights stay. A model without heads, such as a plugin's module, stays as it is.

    Args:
        model: the recipe's model.
        given: the degrees of the recipe.
        degrees: the degrees of the check.
        lengths: tokens of a row in the recipe, and in the check.
        stages: pipeline stages of the check; the model has at least so many blocks.
        unit: all widths of matrices are multiples of this, on each rank.
    """
    sizes = model.model_dump()
    if "n_heads" not in sizes:
        return model
    tensor, width = degrees.tensor, max(WIDTH, unit)
    changes: dict[str, Any] = _shrink_heads(sizes, given.tensor, tensor)
    divides = sizes.get("head_dim", 0) is None  # the width of a head follows from that of the model
    targets: dict[str, Any] = {
        "dim": changes["n_heads"] * width if divides else round_up(4 * WIDTH, unit),
        "head_dim": width,
        "ffn_dim": round_up(6 * WIDTH, tensor * unit),
        "q_lora_rank": round_up(2 * WIDTH, unit),
        "kv_lora_rank": round_up(2 * WIDTH, unit),
        "nope_head_dim": width,
        "rope_head_dim": max(WIDTH // 2, unit),
        "value_head_dim": width,
        "vocab_size": VOCABULARY + (sizes.get("vocab_size") or 0) % 8,
        "max_seq_len": min(sizes.get("max_seq_len") or 0, max(64, lengths[1])),
        "n_dense_layers": min(sizes.get("n_dense_layers") or 0, 1),
        "mtp_depth": min(sizes.get("mtp_depth") or 0, 2),
        **{key: _shrink_reach(sizes.get(key), lengths) for key in _REACHES},
    }
    changes |= {key: size for key, size in targets.items() if sizes.get(key) is not None}
    if sizes.get("moe"):
        changes["moe"] = _shrink_experts(sizes["moe"], given, degrees, unit)
    if sizes.get("rope_scaling"):
        pairs = int(width * sizes.get("rotary_fraction", 1.0)) // 2
        changes["rope_scaling"] = {
            key: value[:pairs] if isinstance(value, list) else value
            for key, value in sizes["rope_scaling"].items()
        }
    small = _rebuild(model, {**sizes, **changes})
    blocks = max(stages, _count_kinds(small), 2)
    return _rebuild(model, {**sizes, **changes, "n_layers": min(blocks, sizes["n_layers"])})


_REACHES = ("window", "chunk", "temperature_floor")
"""keys of positions that a block sees, or counts in"""


def _rebuild(model: ModelConfig, sizes: dict[str, Any]) -> ModelConfig:
    # A copy, which keeps what the task says of the model.
    return model.model_copy(update=dict(type(model).model_validate(sizes)))


def _shrink_heads(sizes: dict[str, Any], given: int, tensor: int) -> dict[str, int]:
    """Return the numbers of heads.

    Whether query heads share key-value heads, and tensor ranks too, stays.
    """
    heads = sizes["n_heads"]
    groups = sizes.get("n_kv_heads", heads)
    fewest = 1 if groups == 1 else max(2, tensor)
    if given > groups:  # several ranks need the same head
        fewest = tensor // 2 if tensor % 2 == 0 else 1
    found = {"n_heads": fewest if heads == groups else max(2 * fewest, tensor)}
    return found | ({"n_kv_heads": fewest} if "n_kv_heads" in sizes else {})


def _shrink_reach(reach: int | None, lengths: tuple[int, int]) -> int | None:
    """Return a reach that ends inside of a row if the given one does."""
    given, length = lengths
    if reach is None:
        return None
    return max(2, length // 4) if reach < given else 2 * length


def _shrink_experts(
    moe: dict[str, Any], given: Degrees, degrees: Degrees, unit: int
) -> dict[str, Any]:
    """Return the sizes of experts; whether ranks hold several, and groups, stay."""
    groups = min(moe["groups"], 4)
    taken = min(moe["experts_per_token"], 2)
    held = 2 if moe["num_experts"] > given.expert else 1
    experts = round_up(
        max(4 * (moe["num_experts"] > 2), held * degrees.expert, taken * groups),
        lcm(degrees.expert, groups),
    )
    widest = round_up(2 * WIDTH, degrees.expert_tensor * (128 if unit > 1 else 1))
    is_grouped = moe["groups_per_token"] < moe["groups"]
    return {
        **moe,
        "num_experts": min(experts, moe["num_experts"]),
        "experts_per_token": taken,
        "expert_ffn_dim": widest,
        "num_shared": min(moe["num_shared"], 2),
        "shared_ffn_dim": moe["shared_ffn_dim"] and round_up(3 * WIDTH, degrees.tensor * unit),
        "groups": groups,
        "groups_per_token": min(moe["groups_per_token"], groups - 1) if is_grouped else groups,
    }


def _count_kinds(model: Any) -> int:
    """Return how many of the first blocks there must be to have one of each kind."""
    kinds = [model.describe_block(number) for number in range(model.n_layers)]
    return max(kinds.index(kind) + 1 for kind in set(kinds))
