"""How Hugging Face stores a parameter of ours: in another layout, in several tensors, or in MXFP4.

The layouts are named by `Layout.hf_forms`. MXFP4, as gpt-oss is published: OCP Microscaling Formats
v1.0, section 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...model_zoo.layout import Part
from ..checkpoint.tensors import (
    DTYPES,
    ConcatenatedTensor,
    DerivedTensor,
    FileTensor,
    StoredChunk,
    TensorRows,
    nbytes,
)
from .hf_folder import StoredTensor


def rows_to_hf(rows: Tensor, form: Sequence[str]) -> Tensor:
    """Return some rows of a parameter as `Layout.hf_forms` has them elsewhere."""
    if "interleaved" in form:
        rows = rows.transpose(1, 2)
    if "interleaved" in form or "joined" in form:
        rows = rows.flatten(1, 2)
    return (rows.mT if "transposed" in form else rows).contiguous()


def rows_from_hf(rows: Tensor, form: Sequence[str]) -> Tensor:
    """Return what `rows_to_hf` was given."""
    if "transposed" in form:
        rows = rows.mT
    if "joined" in form:
        rows = rows.reshape(len(rows), 2, -1, *rows.shape[2:])
    if "interleaved" in form:
        rows = rows.reshape(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2)
    return rows.contiguous()


@dataclass(frozen=True)
class TransformedTensor(DerivedTensor):
    """One of our parameters in Hugging Face's layout, or one of theirs in ours.

    Args:
        form: how theirs differs from ours, see `Layout.hf_forms`.
        from_hf: True if the source is in Hugging Face's layout.
    """

    form: tuple[str, ...]
    from_hf: bool = False

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        rows = self.source.read(first, last)
        return rows_from_hf(rows, self.form) if self.from_hf else rows_to_hf(rows, self.form)


@dataclass(frozen=True)
class StackedMatrix(DerivedTensor):
    """One of the matrices [rows, columns] in a tensor [E, ..., rows, columns].

    Args:
        position: index of the matrix along the leading dimensions.
    """

    position: tuple[int, ...]

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        number, *inside = self.position
        return self.source.read(number, number + 1)[(0, *inside)][first:last]


def extract_part(tensor: TensorRows, part: Part) -> TensorRows:
    """Return what Hugging Face stores as one part of a parameter of ours."""
    if part.form:
        return TransformedTensor(tensor, part.shape, part.form)
    if len(part.shape) == len(tensor.shape):
        return tensor
    position = part.start[: -len(part.shape)]
    if isinstance(tensor, FileTensor):  # a matrix can be read without the rest of its stack
        number = 0
        for index, count in zip(position, tensor.shape, strict=False):
            number = number * count + index
        size = nbytes(part.shape, tensor.dtype)
        return replace(tensor, offset=tensor.offset + number * size, shape=part.shape)
    return StackedMatrix(tensor, part.shape, position)


def open_parameter(
    parts: Sequence[Part], shape: tuple[int, ...], stored: Mapping[str, FileTensor | Mxfp4]
) -> TensorRows:
    """Return a parameter of ours as Hugging Face stores it, in one or several tensors of a dtype.

    Args:
        parts: see `Layout.hf_parts`.
        shape: of the parameter.
        stored: tensors by their names there.
    """
    regions, part = [stored[part.name] for part in parts], parts[0]
    if part.form:
        return TransformedTensor(regions[0], shape, part.form, from_hf=True)
    if len(part.shape) == len(shape):
        return regions[0]
    # A matrix of a stack lies as a box of the stack does.
    ones = (1,) * (len(shape) - len(part.shape))
    boxes = [
        StoredChunk(part.start, replace(tensor, shape=(*ones, *tensor.shape)))
        for part, tensor in zip(parts, regions, strict=True)
    ]
    return ConcatenatedTensor(regions[0].dtype, shape, tuple(boxes))


def open_stored_tensor(stored: StoredTensor) -> FileTensor | Mxfp4:
    """Return a tensor as one that can be read; its dtype is one of `DTYPES`."""
    scales = stored.scales
    if scales is None:
        return FileTensor(stored.file, stored.offset, DTYPES[stored.dtype], stored.shape)
    packed = FileTensor(stored.file, stored.offset, torch.uint8, (*scales.shape, 16))
    powers = FileTensor(scales.file, scales.offset, torch.uint8, scales.shape)
    return Mxfp4(packed, powers, stored.shape)


VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BIAS = 127


@dataclass(frozen=True)
class Mxfp4:
    """Matrices of experts [E, K, N], read as bf16, which holds them exactly.

    Args:
        blocks: uint8 [E, N, K / 32, 16], two numbers of K a byte, the low half first.
        scales: uint8 [E, N, K / 32], exponents.
        shape: of what is read.
    """

    blocks: TensorRows
    scales: TensorRows
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def read(self, first: int, last: int) -> Tensor:
        """Return some experts."""
        packed, scales = self.blocks.read(first, last), self.scales.read(first, last)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        values = torch.cat((VALUES, -VALUES)).to(self.dtype)[codes.int()]
        exponents = (scales.int() - BIAS).unsqueeze(-1)
        return torch.ldexp(values, exponents).to(self.dtype).flatten(-2).mT.contiguous()
