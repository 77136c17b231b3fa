"""Both fused halves of a mixture of experts, as a model uses them."""

from __future__ import annotations

from torch import Tensor

from ..routing.reference import RoutingPlan
from .op import moe_down_combine, moe_up_swiglu

TORCH = None
"""no fused experts: an operation for each part, see `Kernels.grouped_gemm` and `Kernels.permute`"""


def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, plan: RoutingPlan, weight: Tensor
) -> Tensor:
    """Return [T, D], the weighted sum of what each token's experts make of it.

    Choices behind the rows of all experts add nothing: dropped ones, and those of padding.

    Args:
        x: [T, D], tokens in their own order.
        gate_up: [E, 2 * F, D], of each expert the rows of the gate and then those of up.
        down: [E, D, F].
        plan: of [T, A] choices.
        weight: [T, A], the router's.
    """
    return moe_down_combine(moe_up_swiglu(x, gate_up, plan), down, plan, weight)
