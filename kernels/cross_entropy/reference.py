"""Cross entropy of a linear projection, by chunks of rows: all logits are never held at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 2**24
IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the summed cross entropy of softmax(hidden @ weight.T) against the labels.

    The forward pass computes the gradients of a chunk while its logits exist, so that nothing is
    kept or computed twice; the backward pass only scales them.

    Args:
        hidden: [T, D]; its dtype is the products'.
        weight: [V, D]; any dtype, its gradient has the same.
        labels: [T] class numbers; rows with -100 add nothing.
        z_loss: weight of the squared log-partition added to each counted row
            (PaLM, arXiv:2204.02311, section 5).
        chunk: rows at a time; by default so many that a chunk has 2**24 logits.

    Returns:
        The sum over the counted rows: a scalar in fp32 (fp64 for fp64 input).
    """
    rows = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, z_loss, rows)
        return loss
    weight = weight.to(hidden.dtype)
    parts = [
        _loss_and_probabilities(h @ weight.T, y, z_loss)[0]
        for h, y in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return torch.stack(parts).sum()


def _loss_and_probabilities(
    logits: Tensor, labels: Tensor, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss, softmax [T, V] and log-partition [T] of a chunk, in fp32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = labels != IGNORED
    probabilities = wide.softmax(-1)
    # The largest probability is exp(max - log_partition) and never underflows.
    log_partition = wide.amax(-1) - probabilities.amax(-1).log()
    chosen = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    losses = log_partition - chosen + z_loss * log_partition.square()
    return (losses * counted).sum(), probabilities, log_partition


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, rows: int
    ) -> Tensor:
        cast = weight.to(hidden.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        losses = []
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start : start + rows], labels[start : start + rows]
            loss, grad_logits, log_partition = _loss_and_probabilities(h @ cast.T, y, z_loss)
            losses.append(loss)
            counted = (y != IGNORED).to(grad_logits.dtype).unsqueeze(1)
            if z_loss:
                grad_logits.mul_(1 + 2 * z_loss * log_partition.unsqueeze(1))
            grad_logits.scatter_add_(1, y.clamp(min=0).unsqueeze(1), -counted)
            grad_logits = grad_logits.to(hidden.dtype)
            # Rows that do not count are dropped here, on [rows, D], not on [rows, V].
            counted = counted.to(hidden.dtype)
            grad_hidden[start : start + rows] = (grad_logits @ cast) * counted
            grad_weight += grad_logits.T @ (h * counted)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return (grad_hidden * grad).to(grad_hidden.dtype), scaled_weight, None, None, None
