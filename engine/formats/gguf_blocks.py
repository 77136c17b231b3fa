"""Matrices of GGUF files: packed as blocks of Q8_0, and gate and up of experts apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.tensors import DerivedTensor, TensorRows
from ..core.errors import CheckpointError
from .gguf_file import BLOCK


@dataclass(frozen=True)
class Q8Packed:
    """Matrices as blocks of Q8_0: of 32 numbers of a row, a scale in fp16 and 32 signed bytes.

    Source: `quantize_row_q8_0_ref` in https://github.com/ggml-org/ggml, src/ggml-quants.c.

    Args:
        source: [..., K], K a multiple of 32.
    """

    source: TensorRows
    dtype: torch.dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., bytes of a row]."""
        *rows, columns = self.source.shape
        return *rows, columns // BLOCK * (BLOCK + 2)

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, as bytes.

        Raises:
            CheckpointError: a number is too large for a scale in fp16.
        """
        blocks = self.source.read(first, last).float().view(last - first, -1, BLOCK)
        scale = blocks.abs().amax(2, keepdim=True) / 127
        if not bool(scale.half().isfinite().all()):
            largest = f"{float(blocks.abs().max()):.6g}"
            raise CheckpointError(
                f"a number is too large for q8_0: {largest}", "write bf16 or fp32"
            )
        scaled = blocks * torch.where(scale == 0, 0, scale.reciprocal())
        # Halves are rounded away from zero, as C's roundf does.
        codes = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
        packed = torch.cat((scale.half().view(torch.uint8), codes.view(torch.uint8)), 2)
        return packed.view(last - first, *self.shape[1:])


@dataclass(frozen=True)
class Q8Rows:
    """Matrices in Q8_0, multiplied in fp32, which holds the products exactly, when it is read.

    Args:
        packed: bytes [..., K / 32 * 34].
        shape: [..., K].
    """

    packed: TensorRows
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, as fp32."""
        packed = self.packed.read(first, last).contiguous()
        blocks = packed.view(last - first, -1, BLOCK + 2)
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        values = blocks[..., 2:].contiguous().view(torch.int8) * scale
        return values.view(last - first, *self.shape[1:])


@dataclass(frozen=True)
class StackHalf(DerivedTensor):
    """Gate or up of experts, [E, F, ...], of a stack [E, 2, F, ...].

    Args:
        index: 0 for gate, 1 for up.
    """

    index: int

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive."""
        return self.source.read(first, last)[:, self.index].contiguous()
