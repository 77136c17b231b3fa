"""The recipe's `[kernels]` table. Torch-free."""

from __future__ import annotations

from typing import Annotated

from ...kernels.registry import kernels
from ..core.config import OneOf, Table


class KernelChoices(Table):
    """Operation -> implementation; "auto" chooses by device, shape, and eager or compiled."""

    attention: Annotated[str, OneOf(kernels["attention"], "auto")] = "auto"
    """"matmul": plain products, fastest on CPUs for short rows; "sdpa": torch's fused attention,
    and on GPUs in 16 bits flash attention of flat rows for documents and windows, without masks"""
    ragged_attention: Annotated[str, OneOf(kernels["ragged_attention"], "auto")] = "auto"
    """attention where data.packing = "ragged"; "blocks": samples of about one length at a time;
    "varlen": torch's flash attention for flat rows, on GPUs, and blocks for what it cannot do"""
    rms_norm: Annotated[str, OneOf(kernels["rms_norm"], "auto")] = "auto"
    """root-mean-square norm; "triton": one kernel, for GPUs"""
    rotary: Annotated[str, OneOf(kernels["rotary"], "auto")] = "auto"
    """rotary position embedding; "triton": one kernel, for GPUs"""
    swiglu: Annotated[str, OneOf(kernels["swiglu"], "auto")] = "auto"
    """gated feed-forward activation; "triton": one kernel, for GPUs"""
    linear_cross_entropy: Annotated[str, OneOf(kernels["linear_cross_entropy"], "auto")] = "auto"
    """output projection and loss in chunks; "compiled": torch.compile fuses what is between its
    products, "auto" where [compile] is enabled; "triton": that is one kernel, for GPUs"""
    grouped_gemm: Annotated[str, OneOf(kernels["grouped_gemm"], "auto")] = "auto"
    """products of the rows of each expert with its weights; "triton": one kernel, for GPUs"""
    permute: Annotated[str, OneOf(kernels["permute"], "auto")] = "auto"
    """sorts tokens by expert, and back; "triton": three kernels, for GPUs"""
    moe: Annotated[str, OneOf(kernels["moe"], "auto")] = "auto"
    """"torch": `grouped_gemm`, `swiglu` and `permute` compute experts one after another; "fused":
    two kernels for GPUs do, which sort no copy of the tokens: they hold less memory and take
    about as long (on an H200); not for experts that ranks share, in float8 or with adapters"""
