"""Tokens dispatched to their experts' rows and combined again, as a model uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing.op import routing_plan
from ..routing.reference import RoutingPlan, untiled_plan
from .op import permute, unpermute


class Permutation(NamedTuple):
    """Three functions that go together."""

    plan: Callable[..., RoutingPlan]
    """(choices [T, A], number of experts) -> plan; see `routing_plan`. Its tile map is empty where
    the products that belong to it read none."""
    gather: Callable[[Tensor, RoutingPlan], Tensor]
    """[T, D] -> [T * A, D]: the row of each choice's token, sorted by expert."""
    combine: Callable[[Tensor, RoutingPlan], Tensor]
    """[T * A, D] -> [T, D]: the sum of each token's rows, in fp32 at least."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_token: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.index_select(0, row_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # autograd would scatter with atomics on a GPU; a bag sums a token's rows in a fixed order.
        (slot,) = ctx.saved_tensors
        return F.embedding_bag(slot, grad.contiguous(), mode="sum"), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, row_token: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_token)
        return F.embedding_bag(slot, y.contiguous(), mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_token,) = ctx.saved_tensors
        return grad.index_select(0, row_token), None, None


def _gather(x: Tensor, plan: RoutingPlan) -> Tensor:
    return cast(Tensor, _Gather.apply(x, plan.row_token, plan.slot))  # type: ignore[no-untyped-call]


def _combine(y: Tensor, plan: RoutingPlan) -> Tensor:
    return cast(Tensor, _Combine.apply(y, plan.row_token, plan.slot))  # type: ignore[no-untyped-call]


TORCH = Permutation(untiled_plan, _gather, _combine)
"""by indices and bags of rows"""
TRITON = Permutation(
    routing_plan, lambda x, plan: permute(x, plan.slot), lambda y, plan: unpermute(y, plan.slot)
)
