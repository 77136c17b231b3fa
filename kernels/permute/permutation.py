"""The way of tokens to their experts and back, as a model uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing import op as routing_op
from ..routing import reference as routing
from ..routing.reference import RoutingPlan
from . import op
from . import permutation as library


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


class Permutation(NamedTuple):
    """Three functions that go together."""

    plan: Callable[..., RoutingPlan]
    """(choices [T, A], number of experts) -> plan; see `routing_plan`. What reads no tile map of it
    may get none."""
    gather: Callable[[Tensor, RoutingPlan], Tensor]
    """[T, D] -> [T * A, D]: the row of each choice's token, sorted by expert."""
    combine: Callable[[Tensor, RoutingPlan], Tensor]
    """[T * A, D] -> [T, D]: the sum of each token's rows, in fp32 at least."""


TORCH = Permutation(routing.untiled_plan, library.gather, library.combine)
TRITON = Permutation(
    routing_op.routing_plan,
    lambda x, plan: op.permute(x, plan.slot),
    lambda y, plan: op.unpermute(y, plan.slot),
)
