"""How large the adapters of a recipe are, and what a step with them costs. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from ...model_zoo.layout import DOWN, UP, Layout, is_adapter
from ..core.text.expressions import match_names

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from .tables import LoRA


def with_adapters(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, table: LoRA
) -> dict[str, tuple[int, ...]]:
    """Return shapes of parameters by name, with those of the adapters that a table asks for."""
    tests = [match_names(pattern) for pattern in table.targets] if table.rank else []
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found[name] = shape
        is_projection = name.startswith(f"{layout.blocks}.") and len(shape) == 2
        if is_projection and any(test(name) for test in tests):
            path = name.rpartition(".")[0]
            found[f"{path}.{DOWN}"] = (table.rank, shape[1])
            found[f"{path}.{UP}"] = (shape[0], table.rank)
    return found


def flops_per_token(model: LanguageModel, config: ModelConfig, seq_len: int) -> float:
    """Return floating-point operations a token of one training step, forward and backward.

    Without adapters the model's own count. With them, frozen weights have no gradient of their own
    (4 operations instead of 6), adapters have (6), and blocks before the first one with an adapter
    have no backward pass. That one is counted in full, though what it reads needs no gradient.
    """
    whole, weights = config.flops_per_token(seq_len), config.flops_per_token(0)
    adapters, others = _multiplying(model, config.layout)
    if not any(adapters):
        return whole
    forward_only = next(number for number, count in enumerate(adapters) if count)
    attention = (whole - weights) / len(adapters)
    saved = weights / 3 + attention * 2 / 3 * forward_only
    saved += sum(2.0 * count for count in others[:forward_only])
    return whole - saved + 6.0 * sum(adapters)


def _multiplying(model: LanguageModel, layout: Layout) -> tuple[list[int], list[int]]:
    """Return how many elements each block's adapters have, and its projections."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    prefix = f"{layout.blocks}."
    for name, shape in {**shapes, **model.remote_parameters}.items():
        if name.startswith(prefix) and len(shape) == 2:
            number = int(name.removeprefix(prefix).partition(".")[0])
            counts[number][not is_adapter(name)] += prod(shape)
    adapters, others = zip(*(counts[number] for number in sorted(counts)), strict=True)
    return list(adapters), list(others)
