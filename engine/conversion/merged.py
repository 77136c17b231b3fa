"""Weights with the adapters of a checkpoint merged into them, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...model_zoo.layers.adapter_names import DOWN, UP, is_adapter
from ..checkpoint.tensors import Changed, TensorRows
from ..core.errors import CheckpointError
from ..core.text.listed import listed
from ..lora.adapter_weights import merge

BLOCK_ROWS = 64
"""Rows are merged by whole blocks: other shapes of a product may round another way"""


@dataclass(frozen=True)
class Merged(Changed):
    """A weight and the adapter beside it; see `merge`."""

    down: Tensor
    up: Tensor
    scale: float

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        low = first // BLOCK_ROWS * BLOCK_ROWS
        high = min(-(-last // BLOCK_ROWS) * BLOCK_ROWS, self.shape[0])
        blocks = [
            merge(self.source.read(start, end), self.down, self.up[start:end], self.scale)
            for start in range(low, high, BLOCK_ROWS)
            for end in [min(start + BLOCK_ROWS, high)]
        ]
        return torch.cat(blocks)[first - low : last - low]


def merge_tensors(
    place: Path, tensors: Mapping[str, TensorRows], alpha: float
) -> dict[str, TensorRows]:
    """Return a checkpoint's weights by name, each adapter merged into the weight beside it.

    Args:
        place: the checkpoint.
        tensors: weights and adapters by name.
        alpha: of the adapters; their rank is their own.

    Raises:
        CheckpointError: an adapter does not fit its weight, all such are listed.
    """
    weights = {name: each for name, each in tensors.items() if not is_adapter(name)}
    problems = []
    for name in sorted({name.rpartition(".")[0] for name in tensors if is_adapter(name)}):
        parts = [tensors.get(f"{name}.{leaf}") for leaf in ("weight", DOWN, UP)]
        shapes = [part.shape if part else None for part in parts]
        weight, down, up = parts
        if weight is None or down is None or up is None or not _fits(*shapes):
            problems.append(f"{name}: weight, {DOWN} and {UP} are {shapes}")
            continue
        whole = [part.read(0, part.shape[0]) for part in (down, up)]
        scale = alpha / down.shape[0]
        weights[f"{name}.weight"] = Merged(weight, whole[0], whole[1], scale)
    if problems:
        raise CheckpointError(listed(f"{place} has adapters that do not fit:", problems))
    return weights


def _fits(weight: object, down: object, up: object) -> bool:
    match weight, down, up:
        case (int(out), int(width)), (int(rank), int(down_width)), (int(rows), int(up_rank)):
            return width == down_width and rows == out and up_rank == rank > 0
    return False
