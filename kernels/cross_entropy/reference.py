"""Cross entropy of a linear projection, by chunks of rows: all logits are never held at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..softcap import softcap as cap_softly
from ..softcap import softcap_slope
from ..vocabulary import project
from .product import add_product, scale_gradient

IGNORED = -100

# Each chunk's pass over the weight's gradient should vanish beside its products.
CPU_ROWS, GPU_ROWS = 512, 4096
# So many logits stay, in fp32, in a CPU core's own cache between the passes over them.
CPU_BLOCK_LOGITS = 2**19

ReplaceByGradient = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def replace_by_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the losses of some rows, and write the gradient of their sum over the logits.

    Args:
        logits: [T, V].
        labels: [T]; see `linear_cross_entropy`.
        z_loss: see `linear_cross_entropy`.

    Returns:
        the cross entropy of each row and the z term that is added to it, both [T].
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (labels != IGNORED).to(wide.dtype)
    # gather and scatter take no -100; such a row is multiplied by 0 below.
    chosen = labels.clamp(min=0).unsqueeze(1)
    probabilities = wide.softmax(-1)
    # The largest probability is exp(largest logit - log_partition) and never underflows.
    log_partition = wide.amax(-1) - probabilities.amax(-1).log()
    losses = (log_partition - wide.gather(1, chosen).squeeze(1)) * counted
    penalties = z_loss * log_partition.square() * counted
    scale = counted * (1 + 2 * z_loss * log_partition)
    gradient = probabilities.mul_(scale.unsqueeze(1))
    # softmax minus one at the label, in the memory of softmax.
    gradient.scatter_add_(1, chosen, -counted.unsqueeze(1))
    logits.copy_(gradient)
    return losses, penalties


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
    inner: ReplaceByGradient = replace_by_gradient,
    is_split: bool = False,
    token_losses: list[Tensor] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the summed cross entropy of softmax(hidden @ weight.T) against the labels.

    The forward pass computes a chunk's gradients while its logits exist, so that nothing is kept
    or computed twice; the backward pass only scales them.

    Args:
        hidden: [T, D]; its dtype is the products'.
        weight: [V, D]; any dtype; its gradient has the same and is summed in fp32 at least.
        labels: [T] class numbers; rows with -100 add nothing.
        z_loss: weight of the squared log-partition added to each counted row
            (PaLM, arXiv:2204.02311, section 5).
        chunk: rows at a time.
        inner: what replaces logits by their gradient, some rows at a time.
        is_split: the weight has the rows of some classes alone, and `inner` asks others for the
            rest: it then gets the same rows everywhere, also where no gradient is wanted.
        token_losses: gets the cross entropy of each row, without the z term and without gradient,
            [T] in pieces.
        softcap: logits are capped at it, see `softcap.softcap`; None: they are not.

    Returns:
        The sum over the counted rows: a scalar in fp32 (fp64 for fp64 input).
    """
    rows = chunk or (CPU_ROWS if hidden.device.type == "cpu" else GPU_ROWS)
    if not torch.is_grad_enabled() and not is_split:
        cast = weight.to(hidden.dtype)
        return _loss_alone(hidden, cast, labels, z_loss, rows, token_losses, softcap)
    if softcap is not None:
        inner = partial(_replace_capped, inner, softcap)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, z_loss, rows, inner, is_split, token_losses
    )
    return loss


def _loss_alone(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    rows: int,
    token_losses: list[Tensor] | None,
    softcap: float | None,
) -> Tensor:
    sums = []
    for h, y in zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True):
        wide = project(h, weight, 1.0, softcap)
        log_partition = wide.logsumexp(-1)
        chosen = wide.gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1)
        counted = y != IGNORED
        losses = (log_partition - chosen) * counted
        sums.append((losses + z_loss * log_partition.square() * counted).sum())
        if token_losses is not None:
            token_losses.append(losses)
    return torch.stack(sums).sum()


def _replace_capped(
    inner: ReplaceByGradient, softcap: float, logits: Tensor, labels: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return the losses of capped logits, and write their gradient by the uncapped ones over them.

    See `replace_by_gradient`.
    """
    capped = cap_softly(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    slope = softcap_slope(capped, softcap)
    found = inner(capped, labels, z_loss)
    logits.copy_(slope.mul_(capped))  # which is the gradient now
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        rows: int,
        inner: ReplaceByGradient,
        is_split: bool,
        token_losses: list[Tensor] | None,
    ) -> Tensor:
        # Once for all chunks; products run in the dtype of the hidden states.
        cast = weight.to(hidden.dtype)
        block = rows
        # Ranks that share the vocabulary must call `inner` the same number of times.
        if hidden.is_cpu and not is_split:
            block = max(1, CPU_BLOCK_LOGITS // weight.shape[0])
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        sums = []
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            grad_logits = hidden[chunk] @ cast.T
            blocks = torch.split(grad_logits, block), torch.split(labels[chunk], block)
            for logits, y in zip(*blocks, strict=True):
                losses, penalties = inner(logits, y, z_loss)
                sums.append((losses + penalties).sum())
                if token_losses is not None:
                    token_losses.append(losses)
            # The loss is a scalar, so the backward pass only scales: gradients can be computed now,
            # while the logits are there.
            if ctx.needs_input_grad[0]:
                torch.mm(grad_logits, cast, out=grad_hidden[chunk])
            if ctx.needs_input_grad[1]:
                grad_weight = add_product(grad_weight, grad_logits.T, hidden[chunk])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = scale_gradient(grad_weight, grad, ctx.weight_dtype)
        return (grad_hidden * grad).to(grad_hidden.dtype), grad_weight, *[None] * 6
