"""The recipe's `[kernels]` table. Torch-free."""

from __future__ import annotations

from typing import Literal

from ..core.config import Table


class KernelChoices(Table):
    """Operation -> implementation; "auto" picks by device and shape."""

    attention: Literal["auto", "matmul", "sdpa"] = "auto"
    """"matmul": plain products, fastest on CPUs for short rows; "sdpa": torch's fused attention"""
    rms_norm: Literal["auto", "torch", "triton"] = "auto"
    """root-mean-square norm; "triton": one kernel, for GPUs"""
    rotary: Literal["auto", "torch", "triton"] = "auto"
    """rotary position embedding; "triton": one kernel, for GPUs"""
    swiglu: Literal["auto", "torch", "triton"] = "auto"
    """gated feed-forward activation; "triton": one kernel, for GPUs"""
    linear_cross_entropy: Literal["auto", "torch", "compiled", "triton"] = "auto"
    """output projection and loss in chunks; "compiled": torch.compile fuses what is between its
    products, "auto" where [compile] is enabled; "triton": that is one kernel, for GPUs"""
    grouped_gemm: Literal["auto", "torch", "triton"] = "auto"
    """products of the rows of each expert with its weights; "triton": one kernel, for GPUs"""
    permute: Literal["auto", "torch", "triton"] = "auto"
    """sorts tokens by expert, and back; "triton": three kernels, for GPUs"""
