"""The routing plan as a torch operation: the reference on CPUs, Triton on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .reference import RoutingPlan, tile_bound


def routing_plan(sel: Tensor, num_experts: int, *, block_m: int = 128) -> RoutingPlan:
    """Return the plan for the experts that tokens chose; see `reference.routing_plan`."""
    return RoutingPlan(*_routing_plan(sel, num_experts, block_m))


@torch.library.custom_op("trainer::routing_plan", mutates_args=(), device_types="cpu")
def _routing_plan(
    sel: Tensor, num_experts: int, block_m: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return reference.routing_plan(sel, num_experts, block_m=block_m)


@_routing_plan.register_kernel("cuda")
def _(
    sel: Tensor, num_experts: int, block_m: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import triton

    return triton.routing_plan(sel, num_experts, block_m=block_m)


@_routing_plan.register_fake
def _(
    sel: Tensor, num_experts: int, block_m: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    size = sel.shape[0] * sel.shape[1]
    ints = torch.int32
    return (
        sel.new_empty(num_experts, dtype=ints),
        sel.new_empty(num_experts, dtype=ints),
        sel.new_empty(num_experts + 1, dtype=ints),
        sel.new_empty(size, dtype=ints),
        sel.new_empty(sel.shape, dtype=ints),
        sel.new_empty(tile_bound(size, num_experts, block_m), dtype=ints),
        sel.new_empty(1, dtype=ints),
    )
