"""Fused attention with sinks: what a kernel without them finds, and what they take of it.

A sink is a key whose value is zero. So it changes an output by a factor, and a gradient only
through what softmax divides by: both follow from the log of that sum, which the partial kernels
return.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .partial_sdpa import SDPA


def sinking(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """Attend with torch's fused attention and sinks; see `reference.sdpa`."""
    S, L = query.shape[1], key.shape[1]
    if mask is None and S < L:
        mask = torch.ones(S, L, dtype=torch.bool, device=query.device).tril(L - S)
        mask = mask.expand(len(query), 1, -1, -1)
    out: Tensor = _Sinking.apply(query, key, value, mask, sinks)  # type: ignore[no-untyped-call]
    return out


class _Sinking(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
    ) -> Tensor:
        out, log_sums = SDPA.forward(query, key, value, mask, mask is None)
        # [B, S, H] beside the output.
        sums_BSH, sinks_H = log_sums.transpose(1, 2), sinks.to(log_sums.dtype)
        kept = torch.sigmoid(sums_BSH - sinks_H)
        out = (out * kept.unsqueeze(-1)).to(query.dtype)
        total = torch.logaddexp(sums_BSH, sinks_H).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, total = ctx.saved_tensors
        grad = grad.contiguous()
        found = SDPA.backward(grad, query, key, value, out, total, mask, mask is None)
        taken_BHS = torch.exp(sinks.to(total.dtype).unsqueeze(1) - total)
        dots_BSH = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
        grad_sinks = -(taken_BHS * dots_BSH.transpose(1, 2)).sum((0, 2))
        return *found, None, grad_sinks.to(sinks.dtype)
