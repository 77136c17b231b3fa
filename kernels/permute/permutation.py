"""The way of tokens to their experts and back, as a model uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..routing import op as routing_op
from ..routing import reference as routing
from ..routing.reference import RoutingPlan
from . import library, op


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
