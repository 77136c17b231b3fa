"""The adapters that a recipe asks for, and how large they are. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...model_zoo.layers.adapter_names import DOWN, UP
from ..optim.groups import matcher

if TYPE_CHECKING:
    from ...model_zoo.layout import Layout
    from .tables import LoRA


def with_adapters(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, table: LoRA
) -> dict[str, tuple[int, ...]]:
    """Return shapes of parameters by name, with those of the adapters that a table asks for."""
    tests = [matcher(pattern) for pattern in table.targets] if table.rank else []
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found[name] = shape
        is_projection = name.startswith(f"{layout.blocks}.") and len(shape) == 2
        if is_projection and any(test(name) for test in tests):
            path = name.rpartition(".")[0]
            found[f"{path}.{DOWN}"] = (table.rank, shape[1])
            found[f"{path}.{UP}"] = (shape[0], table.rank)
    return found
