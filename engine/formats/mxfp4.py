"""Weights in MXFP4 (OCP Microscaling Formats v1.0, section 5.3), as gpt-oss's are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..checkpoint.tensors import TensorRows

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
