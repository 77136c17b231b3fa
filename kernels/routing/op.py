"""The routing plan as a torch operation: the reference on CPUs, Triton on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import operator
from . import reference
from .reference import RoutingPlan, tile_bound

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def routing_plan(sel: Tensor, num_experts: int, *, block_m: int = 128) -> RoutingPlan:
    """Return the plan for the experts that tokens chose; see `reference.routing_plan`."""
    return RoutingPlan(*_routing_plan(sel, num_experts, block_m))


@operator("routing_plan", cuda="routing.triton:routing_plan")
def _routing_plan(sel: Tensor, num_experts: int, block_m: int) -> Tensors:
    return reference.routing_plan(sel, num_experts, block_m=block_m)


@_routing_plan.register_fake
def _(sel: Tensor, num_experts: int, block_m: int) -> Tensors:
    shapes = (
        (num_experts,),
        (num_experts,),
        (num_experts + 1,),
        (sel.shape[0] * sel.shape[1],),
        sel.shape,
        (tile_bound(sel.shape[0] * sel.shape[1], num_experts, block_m),),
        (1,),
    )
    return RoutingPlan(*(sel.new_empty(shape, dtype=torch.int32) for shape in shapes))
