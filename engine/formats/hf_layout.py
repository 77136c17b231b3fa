"""Converts parameters between our layout and Hugging Face's: transposed, split, or MXFP4.

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
    """Convert rows of one of our parameters to the layout in which Hugging Face stores them.

    Args:
        rows: rows along the first dimension of the parameter.
        form: the differences between the two layouts, see `Layout.hf_forms`.
    """
    if "interleaved" in form:
        rows = rows.transpose(1, 2)
    if "interleaved" in form or "joined" in form:
        rows = rows.flatten(1, 2)
    return (rows.mT if "transposed" in form else rows).contiguous()


def rows_from_hf(rows: Tensor, form: Sequence[str]) -> Tensor:
    """Convert rows from Hugging Face's layout to ours: the inverse of `rows_to_hf`."""
    if "transposed" in form:
        rows = rows.mT
    if "joined" in form:
        rows = rows.reshape(len(rows), 2, -1, *rows.shape[2:])
    if "interleaved" in form:
        rows = rows.reshape(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2)
    return rows.contiguous()


@dataclass(frozen=True)
class TransformedTensor(DerivedTensor):
    """A tensor that is converted between our layout and Hugging Face's when it is read.

    Args:
        form: the differences between the two layouts, see `Layout.hf_forms`.
        from_hf: True if the source is in Hugging Face's layout, False if it is in ours.
    """

    form: tuple[str, ...]
    from_hf: bool = False

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, in the other layout."""
        rows = self.source.read(first, last)
        return rows_from_hf(rows, self.form) if self.from_hf else rows_to_hf(rows, self.form)


@dataclass(frozen=True)
class StackedMatrix(DerivedTensor):
    """One matrix [rows, columns] of a stacked tensor [E, ..., rows, columns].

    Args:
        position: index of the matrix along the leading dimensions.
    """

    position: tuple[int, ...]

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, of the matrix."""
        number, *inside = self.position
        return self.source.read(number, number + 1)[(0, *inside)][first:last]


@dataclass(frozen=True)
class RowRange(DerivedTensor):
    """Some rows of a tensor.

    Args:
        start: index of the first row.
    """

    start: int

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, of those rows."""
        return self.source.read(self.start + first, self.start + last)


@dataclass(frozen=True)
class Interleaved(DerivedTensor):
    """A query or key weight in Meta's interleaved rotary layout, read in our half-split layout.

    Within each head Meta rotates the rows (2i, 2i + 1) together, while Hugging Face and we rotate
    (i, i + K/2). The permutation equals `permute` in transformers'
    `convert_llama_weights_to_hf.py`.

    Args:
        source: Meta's weight, shape [heads * K, D].
        shape: the same shape.
        head_width: the head width K.
        inverse: the source is in our layout, and is read in Meta's.
    """

    head_width: int
    inverse: bool = False

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, in the other order."""
        width = self.head_width
        # Rows are permuted within a head only, so the whole heads around the range are read.
        low, high = first // width * width, -(-last // width) * width
        row = torch.arange(first, last)
        inside, head = row % width, row // width * width
        if self.inverse:
            source = head + inside % 2 * (width // 2) + inside // 2
        else:
            source = head + 2 * (inside % (width // 2)) + inside // (width // 2)
        return self.source.read(low, high)[source - low]


@dataclass(frozen=True)
class ReshapedRows(DerivedTensor):
    """A tensor whose rows have another shape, of as many numbers."""

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive."""
        return self.source.read(first, last).view(last - first, *self.shape[1:])


def stack_halves(halves: Sequence[TensorRows], shape: tuple[int, ...]) -> TensorRows:
    """Return the stack [E, 2, ...] of which the halves [E, ...] are stored apart."""
    form = (shape[0], 1, *shape[2:])
    starts = [(0, at, *(0,) * (len(shape) - 2)) for at in range(len(halves))]
    chunks = [
        StoredChunk(start, ReshapedRows(half, form))
        for start, half in zip(starts, halves, strict=True)
    ]
    return ConcatenatedTensor(halves[0].dtype, shape, tuple(chunks))


def extract_part(tensor: TensorRows, part: Part) -> TensorRows:
    """Return the tensor that Hugging Face stores for one part of our parameter.

    Args:
        tensor: our whole parameter.
        part: the Hugging Face tensor, and its position in our parameter.
    """
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
    parts: Sequence[Part],
    shape: tuple[int, ...],
    stored: Mapping[str, FileTensor | Mxfp4 | BlockScaled],
) -> TensorRows:
    """Open our parameter from the one or several tensors in which Hugging Face stores it.

    Args:
        parts: the Hugging Face tensors of the parameter, see `Layout.hf_parts`.
        shape: the shape of our parameter.
        stored: Hugging Face's tensors by name; those of one parameter have the same dtype.
    """
    regions, part = [stored[part.name] for part in parts], parts[0]
    if part.inside:
        return RowRange(regions[0], shape, part.inside[0])
    if part.form:
        return TransformedTensor(regions[0], shape, part.form, from_hf=True)
    if len(part.shape) == len(shape):
        return regions[0]
    # Hugging Face stores each expert's matrix by itself; we stack them, so each is a box of ours.
    ones = (1,) * (len(shape) - len(part.shape))
    boxes = [
        StoredChunk(part.start, replace(tensor, shape=(*ones, *tensor.shape)))
        for part, tensor in zip(parts, regions, strict=True)
    ]
    return ConcatenatedTensor(regions[0].dtype, shape, tuple(boxes))


def open_stored_tensor(stored: StoredTensor) -> FileTensor | Mxfp4 | BlockScaled:
    """Return a reader for a stored tensor, whose dtype must be one of `DTYPES`."""
    scales = stored.scales
    if scales is None:
        return FileTensor(stored.file, stored.offset, DTYPES[stored.dtype], stored.shape)
    if stored.block[0]:
        values = FileTensor(stored.file, stored.offset, torch.float8_e4m3fn, stored.shape)
        grid = FileTensor(scales.file, scales.offset, torch.float32, scales.shape)
        return BlockScaled(values, grid, stored.block, stored.shape)
    packed = FileTensor(stored.file, stored.offset, torch.uint8, (*scales.shape, 16))
    powers = FileTensor(scales.file, scales.offset, torch.uint8, scales.shape)
    return Mxfp4(packed, powers, stored.shape)


# The eight magnitudes of E2M1; the fourth bit of a code is the sign.
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BIAS = 127


@dataclass(frozen=True)
class Mxfp4:
    """Expert matrices in MXFP4, dequantized to bf16 when they are read.

    Args:
        blocks: uint8 [E, N, K / 32, 16]; each byte holds two E2M1 values along K, the low four bits
            first.
        scales: uint8 [E, N, K / 32]; E8M0 exponents with a bias of 127.
        shape: the shape of the dequantized tensor, [E, K, N].
        dtype: bf16, which holds the dequantized values exactly.
    """

    blocks: TensorRows
    scales: TensorRows
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def read(self, first: int, last: int) -> Tensor:
        """Return experts `first` to `last`, exclusive, as bf16 [E, K, N]."""
        packed, scales = self.blocks.read(first, last), self.scales.read(first, last)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        values = torch.cat((VALUES, -VALUES)).to(self.dtype)[codes.int()]
        exponents = (scales.int() - BIAS).unsqueeze(-1)
        return torch.ldexp(values, exponents).to(self.dtype).flatten(-2).mT.contiguous()


@dataclass(frozen=True)
class BlockScaled:
    """A float8 matrix with a scale for each block, multiplied in fp32 when it is read.

    Source: `weight_dequant` in https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py.

    Args:
        values: float8 [N, K].
        scales: fp32, one for each block, those at the end of rows and columns included.
        block: rows and columns of a block.
        shape: [N, K], or [..., N, K] with dims of size 1 before them.
        dtype: fp32, which rounds each product once.
    """

    values: TensorRows
    scales: TensorRows
    block: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, as fp32; with dims before N, the whole."""
        (rows, columns), (height, width) = self.values.shape, self.block
        start, end = (first, last) if len(self.shape) == 2 else (0, rows)
        top = start // height
        grid = self.scales.read(top, -(-end // height))
        row_scales = grid[torch.arange(start, end) // height - top]
        scales = row_scales.repeat_interleave(width, 1)[:, :columns]
        return (self.values.read(start, end).float() * scales).view(-1, *self.shape[1:])
