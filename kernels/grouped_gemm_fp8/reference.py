"""Products of groups of rows in fp8 with scales of blocks (DeepSeek-AI 2024, arXiv:2412.19437)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grouped_gemm import reference as grouped_gemm
from ..quantize.reference import BLOCK, dequant, dequant_act


def grouped_mm_fp8(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return [M, N]: each row times the transposed weight of its group, summed in fp32.

    Args:
        x: e4m3 [M, K], K a multiple of 128.
        x_scale: [K / 128, M], as `quant_act` returns it.
        w: e4m3 [E, N, K], N a multiple of 128.
        w_scale: [E, N / 128, K / 128].
        offs: int32 [E], where each group ends; rows behind the last are 0 in the result.
        out_dtype: of the result.
    """
    check_shapes(x, w)
    wide_x = dequant_act(x, x_scale, torch.float32)
    wide_w = torch.stack([dequant(*each, torch.float32) for each in zip(w, w_scale, strict=True)])
    return grouped_gemm.grouped_mm(wide_x, wide_w, offs, out_dtype=out_dtype)


def check_shapes(x: Tensor, w: Tensor) -> None:
    """Refuse sizes that blocks of 128 do not fill.

    Raises:
        ValueError: K or N is no multiple of 128, or the two have different K.
    """
    _, N, K = w.shape
    if x.shape[1] != K or N % BLOCK or K % BLOCK:
        raise ValueError(
            f"rows of {x.shape[1]} values and weights of {N} x {K}: both must have the same width, "
            f"and N and K be multiples of {BLOCK}"
        )
