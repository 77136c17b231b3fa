"""How large the adapters of a recipe are, and what a step with them costs. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from ...model_zoo.layout import DOWN, UP, Layout, is_adapter
from ..core.text.expressions import match_names

if TYPE_CHECKING:
    from ...model_zoo.base import Model
    from ...model_zoo.config import ModelConfig
    from .tables import LoRA


def with_adapters(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, table: LoRA
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters, and of the adapters that a table asks for, by name."""
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


def flops_per_token(model: Model, config: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs per token of one training step, forward and backward.

    Without adapters this is the model's own count. With adapters, an element of a frozen weight has
    no gradient (4 operations instead of 6), an element of an adapter has one (6), and blocks before
    the first one with an adapter have no backward pass. The backward pass of that first block is
    counted in full, although the gradient of its input is not needed.
    """
    whole, weights = config.flops_per_token(seq_len), config.flops_per_token(0)
    adapters, others = _multiplying(model, config.layout) if config.layout.blocks else ([], [])
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


def _multiplying(model: Model, layout: Layout) -> tuple[list[int], list[int]]:
    """Return the number of elements of the adapters, and of the projections, of each block."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    prefix = f"{layout.blocks}."
    for name, shape in {**shapes, **model.remote_parameters}.items():
        if name.startswith(prefix) and len(shape) == 2:
            number = int(name.removeprefix(prefix).partition(".")[0])
            counts[number][not is_adapter(name)] += prod(shape)
    adapters, others = zip(*(counts[number] for number in sorted(counts)), strict=True)
    return list(adapters), list(others)
