"""The two halves of a mixture of SwiGLU experts, over rows sorted by expert.

The gradient of the second half needs no product that the forward pass kept: the weight of a choice
has the gradient <expert's output, grad> = <its input, grad through the expert's weight>
(SonicMoE, arXiv:2512.14080, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..grouped_gemm.reference import grouped_mm
from ..permute.reference import unpermute
from ..routing.reference import RoutingPlan
from ..swiglu import reference as swiglu


def moe_up_swiglu(x: Tensor, w13: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up of each choice's row, and gate and up themselves.

    Args:
        x: [T, K].
        w13: [E, 2 * I, K], of each expert the rows of the gate and then those of up.
        plan: of [T, A] choices.

    Returns:
        [T * A, I] and [T * A, 2 * I], sorted by expert.
    """
    return gathered_swiglu(x, w13, plan.row_token, plan.offs)


def gathered_swiglu(
    x: Tensor, w13: Tensor, row_token: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `moe_up_swiglu` does, from the two parts of the plan that it needs."""
    gate_up = grouped_mm(x[row_token.long()], w13, offs)
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu.swiglu(gate, up), gate_up


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate and up, side by side as they are.

    Args:
        grad: [M, I].
        gate_up: [M, 2 * I].
    """
    return torch.cat(swiglu.backward(grad, *gate_up.chunk(2, dim=-1))[:2], dim=-1)


def moe_down_combine(h: Tensor, w2: Tensor, plan: RoutingPlan, weight: Tensor) -> Tensor:
    """Return [T, K]: the weighted sum of what a token's experts make of its rows.

    Args:
        h: [T * A, I], sorted by expert.
        w2: [E, K, I].
        plan: of [T, A] choices.
        weight: [T, A].
    """
    return unpermute(grouped_mm(h, w2, plan.offs), plan.slot, weight)


def scale_by_router_weight(
    grad: Tensor, h: Tensor, slot: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both times their choice's weight, and each choice's product of the two.

    Args:
        grad: [M, I], of the experts' outputs, through the experts' weights.
        h: [M, I].
        slot: [T, A], the row of each choice.
        weight: [T, A].

    Returns:
        [M, I], [M, I] and [T, A], the gradient of the weights.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    rows = slot.flatten().long()
    # The weight of each sorted row; slots are a permutation.
    of_row = weight.new_empty(len(h), 1).index_copy_(0, rows, weight.reshape(-1, 1)).to(wide)
    dots = (grad.to(wide) * h.to(wide)).sum(-1)
    weighted = (grad * of_row).to(grad.dtype), (h * of_row).to(h.dtype)
    return *weighted, dots[rows].view(slot.shape).to(weight.dtype)
