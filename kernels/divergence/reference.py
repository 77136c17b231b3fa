"""Divergences of a student's softmax from a teacher's, token by token, by chunks of rows.

Peak memory: a chunk's logits of both models and three more tensors of that size, in fp32, beside
the inputs and the student's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cross_entropy.product import add_product, scale_gradient
from ..cross_entropy.reference import CPU_ROWS
from ..log_probs.reference import GPU_ROWS, linear_class_log_probs
from ..softcap import softcap_slope
from ..vocabulary import WHOLE, VocabularyShard, project

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A divergence of student probabilities q from teacher probabilities p, a sum over classes: maps
log q and log p, [T, V] each, to the summands, and to q times the derivative of the sum by q. A
constant that is added to the derivative changes nothing, because probabilities sum to one."""


def forward_kl(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summands of KL(p || q), which makes the student cover what the teacher does.

    See `Divergence`, and Hinton et al. 2015, arXiv:1503.02531.
    """
    likelihood = p.exp()
    return likelihood * (p - q), -likelihood


def reverse_kl(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summands of KL(q || p), which avoids what the teacher would not do.

    See `Divergence`, and Gu et al. 2024, arXiv:2306.08543.
    """
    terms = q.exp() * (q - p)
    return terms, terms


def jensen_shannon(q: Tensor, p: Tensor, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return the summands of beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    It is at most log 2, and symmetric for beta = 0.5; divided by beta it approaches the forward KL
    as beta goes to 0 (Agarwal et al. 2024, arXiv:2306.13649, section 2). See `Divergence`.

    Args:
        q: log-probabilities of the student, [T, V].
        p: those of the teacher.
        beta: the teacher's share of the mixture, between 0 and 1.
    """
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    slopes = (1 - beta) * q.exp() * (q - mixture)
    return beta * p.exp() * (p - mixture) + slopes, slopes


def linear_divergence(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    counted: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    shard: VocabularyShard = WHOLE,
    chunk: int | None = None,
    token_losses: list[Tensor] | None = None,
    softcaps: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """Return the summed divergence of the student's distributions from the teacher's.

    The forward pass computes a chunk's gradients while its logits exist, as in the cross entropy:
    the backward pass needs neither model's weight again, and only scales.

    Args:
        student: hidden states [T, D] and head weight [V, D]; both get gradients.
        teacher: hidden states [T, E] and head weight [V, E], without gradient.
        counted: [T] bool; the other rows add nothing.
        divergence: which one.
        temperature: both models' logits are divided by it. The result is not multiplied by its
            square, which a criterion does to keep the size of gradients (Hinton et al. 2015,
            arXiv:1503.02531, section 2).
        shard: which classes the rows of both weights are; see `log_probs.linear_log_probs`.
        chunk: rows at a time.
        token_losses: gets the divergence of each row, without gradient, [T] in pieces.
        softcaps: the caps of the student's and of the teacher's logits, see `softcap.softcap`.

    Returns:
        The sum over the counted rows, in nats: a scalar in fp32 (fp64 for fp64 input).
    """
    rows = chunk or (CPU_ROWS if student[0].device.type == "cpu" else GPU_ROWS)
    # Autograd says that an input needs a gradient even where gradients are off.
    own = student if torch.is_grad_enabled() else [each.detach() for each in student]
    frozen = [each.detach() for each in teacher]
    found: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
        *own, *frozen, counted, divergence, temperature, shard, rows, token_losses, softcaps
    )
    return found


def linear_sparse_divergence(
    student: tuple[Tensor, Tensor],
    classes: Tensor,
    log_probs: Tensor,
    counted: Tensor,
    divergence: Divergence,
    *,
    temperature: float = 1.0,
    shard: VocabularyShard = WHOLE,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the divergence from a teacher of which only the likeliest classes are known.

    All other classes count as one, whose probability is what is left. The result is at most the
    divergence over all classes (it is that of a function of the class), equals it where k = V, and
    is 0 only if the student has the teacher's probabilities for the known classes. The known
    probabilities are not scaled to a sum of one: that is a biased estimate of the teacher, which
    makes students too certain (Anshumann et al. 2025, arXiv:2503.16870).

    Args:
        student: hidden states [T, D] and head weight [V, D]; both get gradients.
        classes: [T, k] the teacher's likeliest classes, all different; -100 is no class.
        log_probs: [T, k] their log-probabilities at the same temperature.
        counted: [T] bool; the other rows give 0 and have no gradient.
        divergence: which one.
        temperature: see `linear_divergence`.
        shard: see `linear_log_probs`.
        chunk: rows at a time.
        softcap: see `linear_log_probs`.

    Returns:
        [T] in fp32 (fp64 for fp64 input), in nats.
    """
    q, q_rest = linear_class_log_probs(
        *student, classes, temperature=temperature, shard=shard, chunk=chunk, softcap=softcap
    )
    is_class = classes >= 0
    # What fills a row up may be -inf, and 0 times its gradient would be NaN.
    p = log_probs.to(q.dtype).where(is_class, 0)
    known = p.exp().where(is_class, 0).sum(1)
    # Rounding can bring the sum above one; the logarithm needs something positive.
    p_rest = (1 - known).clamp(min=torch.finfo(q.dtype).tiny).log()
    terms = divergence(q, p)[0].where(is_class, 0).sum(1) + divergence(q_rest, p_rest)[0]
    return terms.where(counted, 0)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        counted: Tensor,
        divergence: Divergence,
        temperature: float,
        shard: VocabularyShard,
        rows: int,
        token_losses: list[Tensor] | None,
        softcaps: tuple[float | None, float | None],
    ) -> Tensor:
        softcap, teacher_softcap = softcaps
        cast, teacher_cast = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        losses = []
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            q = project(hidden[part], cast, temperature, softcap)
            p = project(teacher_hidden[part], teacher_cast, temperature, teacher_softcap)
            # Of the logits, before they become log-probabilities in place.
            cap_slope = None if softcap is None else softcap_slope(q * temperature, softcap)
            # The ranks' sums of exponentials add up only if all subtract the same maximum.
            largest = shard.max_(torch.stack([q.amax(-1), p.amax(-1)]))
            q, p = q.sub_(largest[0].unsqueeze(1)), p.sub_(largest[1].unsqueeze(1))
            totals = shard.sum_(torch.stack([q.exp().sum(-1), p.exp().sum(-1)])).log_()
            q, p = q.sub_(totals[0].unsqueeze(1)), p.sub_(totals[1].unsqueeze(1))
            terms, slopes = divergence(q, p)
            found, mean = shard.sum_(torch.stack([terms.sum(-1), slopes.sum(-1)]))
            losses.append(found.where(counted[part], 0))
            if not any(ctx.needs_input_grad):
                continue
            # Through softmax: d / d logit = q (slope - sum of q slope).
            grad_logits = slopes.addcmul(q.exp_(), mean.unsqueeze(1), value=-1)
            grad_logits.mul_((counted[part] / temperature).unsqueeze(1))
            if cap_slope is not None:
                grad_logits.mul_(cap_slope)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, cast, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = add_product(grad_weight, narrow.T, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        if token_losses is not None:
            token_losses.extend(losses)
        return torch.stack([each.sum() for each in losses]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = scale_gradient(grad_weight, grad, ctx.weight_dtype)
        return grad_hidden, grad_weight, *[None] * 9
