"""Joins the slices of tensors that Meta's files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..checkpoint.tensors import ConcatenatedTensor, StoredChunk, TensorRows
from ..formats.hf_match import Shape


def cut_dim(part: Shape, full: Shape, count: int) -> int | None:
    """Return the dimension along which `count` equal slices make a tensor, or None."""
    if len(part) != len(full):
        return None
    unequal = [dim for dim in range(len(full)) if part[dim] != full[dim]]
    if len(unequal) != 1 or part[unequal[0]] * count != full[unequal[0]]:
        return None
    return unequal[0]


def join(name: str, full: Shape, parts: Sequence[Mapping[str, TensorRows]]) -> TensorRows | None:
    """Concatenate the slices of a tensor from all files.

    Args:
        name: Meta's name of the tensor.
        full: shape of the whole tensor.
        parts: the tensors of each file by name.

    Returns:
        The whole tensor, or None if no file has it; norms are replicated, so that the first file's
        copy is returned.
    """
    regions = [part[name] for part in parts if name in part]
    if not regions:
        return None
    dim = cut_dim(regions[0].shape, full, len(parts)) if len(regions) == len(parts) else None
    if dim is None or {each.shape for each in regions} != {regions[0].shape}:
        return regions[0]
    width = regions[0].shape[dim]
    placed = tuple(
        StoredChunk(tuple(number * width * (at == dim) for at in range(len(full))), region)
        for number, region in enumerate(regions)
    )
    return ConcatenatedTensor(regions[0].dtype, full, placed)
