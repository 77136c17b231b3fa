"""Cross entropy of a linear projection, its inner part one kernel: Triton's or torch.compile's."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from ..operators import operator
from . import reference


@operator(
    "replace_by_gradient",
    cuda="cross_entropy.triton:replace_by_gradient",
    mutates_args=("logits",),
)
def replace_by_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the rows' losses, and write the gradient over the logits; see the reference."""
    return reference.replace_by_gradient(logits, labels, z_loss)


@replace_by_gradient.register_fake
def _(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    return losses, torch.empty_like(losses)


def fusible_replace_by_gradient(
    logits: Tensor, labels: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return what the reference does, written without the scatter that compilers cannot fuse."""
    # One pass: each statement is elementwise or a reduction over the row.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (labels != reference.IGNORED).to(wide.dtype)
    largest = wide.amax(-1, keepdim=True)
    powers = (wide - largest).exp()
    total = powers.sum(-1, keepdim=True)
    log_partition = (largest + total.log()).squeeze(1)
    chosen = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    losses = (log_partition - chosen) * counted
    penalties = z_loss * log_partition.square() * counted
    scale = counted * (1 + 2 * z_loss * log_partition)
    # int32: half the traffic of int64, and the comparison stays inside the fused loop.
    classes = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    is_label = classes == labels.unsqueeze(1).to(torch.int32)
    gradient = powers * (scale.unsqueeze(1) / total) - torch.where(is_label, 1.0, 0.0)
    logits.copy_(gradient)
    return losses, penalties


@cache
def compiled_inner() -> reference.ReplaceByGradient:
    """Return the compiled inner part; made at the first call, since it imports the compiler."""
    return torch.compile(fusible_replace_by_gradient)


linear_cross_entropy = partial(reference.linear_cross_entropy, inner=replace_by_gradient)
"""the summed cross entropy with `replace_by_gradient` inside; see the reference"""
compiled_linear_cross_entropy = partial(
    reference.linear_cross_entropy,
    inner=lambda logits, labels, z_loss: compiled_inner()(logits, labels, z_loss),
)
"""the summed cross entropy with torch.compile inside; see the reference"""
