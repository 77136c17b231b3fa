"""Cross entropy of a linear projection whose inner part is one Triton kernel on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
    token_losses: list[Tensor] | None = None,
) -> Tensor:
    """Return the summed cross entropy; see the reference."""
    return reference.linear_cross_entropy(
        hidden,
        weight,
        labels,
        z_loss=z_loss,
        chunk=chunk,
        inner=replace_by_gradient,
        token_losses=token_losses,
    )


def replace_by_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the rows' losses, and write the gradient over the logits; see the reference."""
    losses, penalties = _replace_by_gradient(logits, labels, z_loss)
    return losses, penalties


@torch.library.custom_op(
    "trainer::replace_by_gradient", mutates_args=("logits",), device_types="cpu"
)
def _replace_by_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    return reference.replace_by_gradient(logits, labels, z_loss)


@_replace_by_gradient.register_kernel("cuda")
def _(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    from . import triton

    return triton.replace_by_gradient(logits, labels, z_loss)


@_replace_by_gradient.register_fake
def _(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    return losses, torch.empty_like(losses)
