"""Rows of tokens sorted by expert and summed again, by torch's own operations."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing.reference import RoutingPlan


def gather(x: Tensor, plan: RoutingPlan) -> Tensor:
    """Return [T * A, D]: the row of each choice's token, sorted by expert.

    Args:
        x: [T, D].
        plan: of [T, A] choices.
    """
    return cast(Tensor, _Gather.apply(x, plan.row_token, plan.slot))  # type: ignore[no-untyped-call]


def combine(y: Tensor, plan: RoutingPlan) -> Tensor:
    """Return [T, D]: the sum of the rows of each token's choices, in fp32 at least.

    Args:
        y: [T * A, D], sorted by expert.
        plan: of [T, A] choices.
    """
    return cast(Tensor, _Combine.apply(y, plan.row_token, plan.slot))  # type: ignore[no-untyped-call]


def _gathered(x: Tensor, row_token: Tensor) -> Tensor:
    return x.index_select(0, row_token)


def _summed(y: Tensor, slot: Tensor) -> Tensor:
    return F.embedding_bag(slot, y, mode="sum")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_token: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return _gathered(x, row_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return _summed(grad.contiguous(), slot), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, row_token: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_token)
        return _summed(y.contiguous(), slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_token,) = ctx.saved_tensors
        return _gathered(grad, row_token), None, None
