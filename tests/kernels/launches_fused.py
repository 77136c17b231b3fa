"""What is compiled of the operations on rows, of quantisation, and of the fused products."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS, WIDTH, INNER, EXPERTS, CHOICES = 512, 4096, 1024, 8, 8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def rms_norm(has_residual: bool) -> None:
    from trainer.kernels.rms_norm import triton

    x, weight = empty(TOKENS, WIDTH), torch.empty(WIDTH)
    residual = x if has_residual else None
    triton.forward(x, residual, weight, 1e-5)
    triton.backward(x, residual, x, weight, torch.empty(TOKENS))


def swiglu(is_weighted: bool) -> None:
    from trainer.kernels.swiglu import triton

    x, weight = empty(TOKENS, WIDTH), torch.empty(TOKENS) if is_weighted else None
    triton.forward(x, x, weight)
    triton.backward(x, x, x, weight)


def rotary() -> None:
    from trainer.kernels.rotary import triton

    angles = torch.empty(64, 1, 64)
    triton.rotary(empty(2, 64, 32, 128), angles, angles, False)


def loss() -> None:
    from trainer.kernels.cross_entropy import triton

    triton.replace_by_gradient(empty(64, 128256), torch.zeros(64, dtype=torch.int64), 1e-4)


def quantize(layout: str) -> None:
    from trainer.kernels.quantize import triton

    triton.quant_act(empty(TOKENS, WIDTH), layout=layout)
    triton.quant_weight(empty(EXPERTS, INNER, WIDTH), layout=layout)


def dequant() -> None:
    from trainer.kernels.quantize import triton

    q = empty(INNER, WIDTH, dtype=torch.float8_e4m3fn)
    triton.dequant(q, torch.empty(INNER // 128, WIDTH // 128), torch.bfloat16)


def grouped_mm_fp8(is_tma: bool) -> None:
    from trainer.kernels.grouped_gemm_fp8 import triton

    e4m3 = torch.float8_e4m3fn
    x, w = empty(TOKENS, WIDTH, dtype=e4m3), empty(EXPERTS, INNER, WIDTH, dtype=e4m3)
    x_scale, w_scale = torch.empty(WIDTH // 128, TOKENS), torch.empty(EXPERTS, 8, WIDTH // 128)
    tiling = triton.HOPPER_TMA if is_tma else triton.POINTERS
    triton.grouped_mm_fp8(x, x_scale, w, w_scale, ints(EXPERTS), tiling=tiling)


def moe_up_swiglu(is_tma: bool, keeps: bool) -> None:
    from trainer.kernels.moe import triton

    x, w13 = empty(TOKENS, WIDTH), empty(EXPERTS, 2 * INNER, WIDTH)
    rows, offs = ints(TOKENS * CHOICES), ints(EXPERTS)
    tiling = triton.HOPPER_TMA if is_tma else triton.POINTERS
    triton.moe_up_swiglu(x, w13, rows, offs, save_gate_up=keeps, tiling=tiling)


def moe_up_small(width: int, dtype: torch.dtype) -> None:
    """Rows that cannot be read 16 bytes at a time, and fp32."""
    from trainer.kernels.moe import triton

    x, w13 = empty(TOKENS, width, dtype=dtype), empty(EXPERTS, 2 * INNER, width, dtype=dtype)
    triton.moe_up_swiglu(x, w13, ints(TOKENS * CHOICES), ints(EXPERTS))


def scale_by_router_weight() -> None:
    from trainer.kernels.moe import triton

    rows = empty(TOKENS * CHOICES, INNER)
    triton.scale_by_router_weight(rows, rows, ints(TOKENS, CHOICES), torch.empty(TOKENS, CHOICES))


def all_to_all() -> None:
    from trainer.kernels.all_to_all import triton

    addresses = torch.zeros(8, dtype=torch.int64)
    triton.pull(TOKENS, WIDTH // 4, addresses, addresses, 1, 64)


EVERYWHERE, SINCE_HOPPER, HOPPER = (80, 90, 100), (90, 100), (90,)

FUSED = {
    "rms_norm": (rms_norm, (False,), EVERYWHERE),
    "rms_norm of a sum": (rms_norm, (True,), EVERYWHERE),
    "swiglu": (swiglu, (False,), EVERYWHERE),
    "swiglu, weighted": (swiglu, (True,), EVERYWHERE),
    "rotary": (rotary, (), EVERYWHERE),
    "cross entropy": (loss, (), EVERYWHERE),
    "quantize, rows": (quantize, ("row",), SINCE_HOPPER),
    "quantize, both": (quantize, ("both",), SINCE_HOPPER),
    "dequantize": (dequant, (), SINCE_HOPPER),
    "fp8 product": (grouped_mm_fp8, (True,), HOPPER),
    "fp8 product, pointers": (grouped_mm_fp8, (False,), SINCE_HOPPER),
    "moe up": (moe_up_swiglu, (True, True), HOPPER),
    "moe up, nothing kept": (moe_up_swiglu, (True, False), HOPPER),
    "moe up, pointers": (moe_up_swiglu, (False, True), EVERYWHERE),
    "moe up, odd rows": (moe_up_small, (WIDTH + 1, torch.bfloat16), EVERYWHERE),
    "moe up, fp32": (moe_up_small, (WIDTH, torch.float32), EVERYWHERE),
    "moe, scaled by router weight": (scale_by_router_weight, (), EVERYWHERE),
    "all to all": (all_to_all, (), EVERYWHERE),
}
"""name -> (what launches, its arguments, the compute capabilities that it is for)"""
