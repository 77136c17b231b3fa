"""Partial attention by the fused kernels that `scaled_dot_product_attention` takes on each device.

On a GPU they are flash attention, and with a mask or in fp32 memory-efficient attention; what
neither can do, plain products do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_private import (
    attend_efficient,
    attend_efficient_backward,
    attend_flash,
    attend_flash_backward,
    attend_flash_cpu,
    attend_flash_cpu_backward,
)
from .partial import MATMUL, PartialAttention, add_sinks, masked_score, sinks_gradient

EFFICIENT_LSE_ALIGNMENT = 32
EFFICIENT_BIAS_ALIGNMENT = 8
FLASH_MAX_WIDTH = 256


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    fused = _cpu if not query.is_cuda else _cuda(query, mask)
    if fused is None or softcap is not None:  # no fused kernel caps scores
        return MATMUL.forward(query, key, value, mask, causal, softcap)
    width = value.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, _pad_width(value, key)))
    out, log_sums = fused.forward(q, k, v, mask, causal)
    return out.transpose(1, 2)[..., :width], log_sums


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    fused = _cpu if not query.is_cuda else _cuda(query, mask)
    if fused is None or softcap is not None:
        return MATMUL.backward(grad, query, key, value, out, log_sums, mask, causal, softcap)
    width = value.shape[-1]
    grad, value, out = (_pad_width(x, key) for x in (grad, value, out))
    g, q, k, v, o = (x.transpose(1, 2) for x in (grad, query, key, value, out))
    dq, dk, dv = fused.backward(g, q, k, v, o, log_sums.contiguous(), mask, causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)[..., :width]


def _pad_width(x: Tensor, key: Tensor) -> Tensor:
    """Return x with zeros up to the width of keys: the fused kernels have one for all."""
    missing = key.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _cuda(query: Tensor, mask: Tensor | None) -> PartialAttention | None:
    """Return the fused kernel for a GPU's tensors, as [B, H, S, K]; None where none serves."""
    width, generation = query.shape[-1], torch.cuda.get_device_capability(query.device)
    half = query.dtype in (torch.float16, torch.bfloat16)
    # The fused kernels read 16 bytes at a time, and know three dtypes.
    if width % 8 or not (half or query.dtype is torch.float32):
        return None
    if half and mask is None and generation >= (8, 0) and width <= FLASH_MAX_WIDTH:
        return _flash
    # GPUs before Ampere have no bf16 products.
    return None if query.dtype is torch.bfloat16 and generation < (8, 0) else _efficient


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else _bias(mask, q.dtype)
    out, log_sums = attend_flash_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    return out, log_sums


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    bias = None if mask is None else _bias(mask, q.dtype)
    dq, dk, dv = attend_flash_cpu_backward(
        grad, q, k, v, out, log_sums, 0.0, causal, attn_mask=bias
    )
    return dq, dk, dv


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    out, log_sums, *_ = attend_flash(q, k, v, 0.0, causal)
    return out, log_sums


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    _mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Of dropout, which is none: what it would start from.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = attend_flash_backward(
        grad, q, k, v, out, log_sums, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset
    )
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    # This kernel knows no grouped heads.
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    out, log_sums, *_ = attend_efficient(q, k, v, _aligned_bias(mask, q), True, 0.0, causal)
    return out, log_sums[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel (torch 2.13) wants log sums in rows of 32; infinity there makes weights of 0.
    missing = -log_sums.shape[-1] % EFFICIENT_LSE_ALIGNMENT
    # Seed and offset of dropout, which is off.
    none = torch.empty((), dtype=torch.int64)
    dq, dk, dv, _ = attend_efficient_backward(
        grad,
        q,
        _repeat_heads(k, q),
        _repeat_heads(v, q),
        _aligned_bias(mask, q),
        out,
        F.pad(log_sums, (0, missing), value=math.inf),
        none,
        none,
        0.0,
        # No gradient for the mask.
        [True, True, True, False],
        causal,
    )
    return dq, _sum_heads(dk, k), _sum_heads(dv, v)


_cpu = PartialAttention("sdpa", _cpu_forward, _cpu_backward)
_flash = PartialAttention("sdpa", _flash_forward, _flash_backward)
_efficient = PartialAttention("sdpa", _efficient_forward, _efficient_backward)


def _repeat_heads(x_BGLK: Tensor, q_BHSK: Tensor) -> Tensor:
    repeats = q_BHSK.shape[1] // x_BGLK.shape[1]
    return x_BGLK if repeats == 1 else x_BGLK.repeat_interleave(repeats, dim=1)


def _sum_heads(x_BHLK: Tensor, like_BGLK: Tensor) -> Tensor:
    """Sum over the query heads that share a key head."""
    if x_BHLK.shape[1] == like_BGLK.shape[1]:
        return x_BHLK
    B, G, L, K = like_BGLK.shape
    return x_BHLK.view(B, G, -1, L, K).sum(2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, masked_score(dtype))


def _aligned_bias(mask: Tensor | None, q_BHSK: Tensor) -> Tensor | None:
    """Return [B, H, S, L] whose rows start at addresses that the kernel can read."""
    if mask is None:
        return None
    length = mask.shape[-1]
    # A padded copy whose rows are cut again: the stride stays aligned.
    padded = F.pad(mask, (0, -length % EFFICIENT_BIAS_ALIGNMENT))
    bias = _bias(padded, q_BHSK.dtype)[..., :length]
    return bias.expand(-1, q_BHSK.shape[1], -1, -1)


SDPA = PartialAttention("sdpa", _forward, _backward)


def attend_in_one_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    softcap: float | None,
    causal: bool,
) -> Tensor:
    """Attend with sinks or capped scores, and keep log sums instead of weights; see `sdpa`."""
    S, L = query.shape[1], key.shape[1]
    if causal and mask is None and S < L:
        mask = torch.ones(S, L, dtype=torch.bool, device=query.device).tril(L - S)
        mask = mask.expand(len(query), 1, -1, -1)
    # A causal mask is made by the kernel, which then leaves out what it hides.
    causal = causal and mask is None
    out: Tensor = _OnePart.apply(query, key, value, mask, sinks, softcap, causal)  # type: ignore[no-untyped-call]
    return out


class _OnePart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        softcap: float | None,
        causal: bool,
    ) -> Tensor:
        out, total = SDPA.forward(query, key, value, mask, causal, softcap)
        if sinks is not None:
            out, total = add_sinks(out, total, sinks)
        if out.dtype != query.dtype:  # no cast that changes nothing: see `_SwiGLU.forward`
            out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, sinks, out, total)
        ctx.how = causal, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, total = ctx.saved_tensors
        grad = grad.contiguous()
        # With the total that includes the sink, the fused backward computes the right weights.
        found = SDPA.backward(grad, query, key, value, out, total, mask, *ctx.how)
        for_sinks = None if sinks is None else sinks_gradient(grad, out, total, sinks)
        return *found, None, for_sinks, None, None
