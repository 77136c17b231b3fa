"""How large the adapters of a recipe are, and what a step with them costs. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

from ...model_zoo.matrices import (
    MAGNITUDE,
    adapted_weight,
    adapter_names,
    is_adapter,
    is_matrix,
    magnitude_name,
)
from ..core.text.expressions import match_names

if TYPE_CHECKING:
    from ...model_zoo.base import Model
    from ...model_zoo.config import ModelConfig
    from .tables import LoRA


def with_adapters(config: ModelConfig, table: LoRA) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters, and of the adapters that a table asks for, by name.

    Args:
        config: the model's, with the vocabulary settled.
        table: the recipe's `[lora]`.
    """
    layout, frozen = config.layout, config.frozen_prefixes
    tests = [match_names(pattern) for pattern in table.targets] if table.rank else []
    found: dict[str, tuple[int, ...]] = {}
    behind: dict[str, tuple[int, ...]] = {}
    path = ""
    for name, shape in config.parameter_shapes().items():
        if name.rpartition(".")[0] != path:
            # A module holds its adapters after all its weights.
            path, found, behind = name.rpartition(".")[0], found | behind, {}
        found[name] = shape
        can_adapt = is_matrix(name, shape, layout) and not name.startswith(frozen)
        if can_adapt and any(test(name) for test in tests):
            down, up = adapter_names(name)
            behind[down] = (*shape[: layout.is_expert(name)], table.rank, shape[-1])
            behind[up] = (*shape[:-1], table.rank)
            if table.dora and not layout.is_expert(name):
                behind[magnitude_name(name)] = shape[:1]
    return found | behind


def flops_per_token(model: Model, config: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs per token of one training step, forward and backward.

    Without adapters this is the model's own count. With adapters, an element of a frozen weight has
    no gradient (4 operations instead of 6), an element of an adapter has one (6), and blocks before
    the first one with an adapter have no backward pass. The backward pass of that first block is
    counted in full, although the gradient of its input is not needed.
    """
    whole, weights = config.flops_per_token(seq_len), config.flops_per_token(0)
    adapters, others = _multiplying(model, config) if config.layout.blocks else ([], [])
    if not any(adapters):
        return whole
    forward_only = next(number for number, count in enumerate(adapters) if count)
    attention = (whole - weights) / len(adapters)
    # Of the 6 operations per element 2 are the forward pass, 2 the gradient of the input, and 2 the
    # gradient of the weight. No frozen weight needs the last 2, and blocks without a backward
    # pass do not need the 2 before either.
    saved = weights / 3 + attention * 2 / 3 * forward_only
    saved += sum(2.0 * count for count in others[:forward_only])
    return whole - saved + 6.0 * sum(adapters)


def _multiplying(model: Model, config: ModelConfig) -> tuple[list[float], list[float]]:
    """Return how many elements of the adapters, and of other matrices, multiply each token.

    There is one number for each block. Of experts only those that a token takes count.
    """
    layout, moe = config.layout, getattr(config, "moe", None)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    taken = moe.experts_per_token / moe.num_experts if moe else 0.0
    counts: dict[int, list[float]] = defaultdict(lambda: [0, 0])
    prefix = f"{layout.blocks}."
    for name, shape in {**shapes, **model.remote_parameters}.items():
        if name.endswith(MAGNITUDE):  # multiplies no matrix
            continue
        is_adapted = is_adapter(name)
        weight = adapted_weight(name) if is_adapted else name
        if is_matrix(weight, shape, layout) and not name.startswith(config.frozen_prefixes):
            number = int(name.removeprefix(prefix).partition(".")[0])
            share = taken if layout.is_expert(name) else 1
            counts[number][not is_adapted] += prod(shape) * share
    adapters, others = zip(*(counts[number] for number in sorted(counts)), strict=True)
    return list(adapters), list(others)
