"""Log-probabilities of classes under softmax(hidden @ weight.T), by chunks of rows.

Peak memory: a chunk's logits, twice in fp32, beside the inputs, their gradients and a few numbers a
row. The forward pass keeps each row's log-partition; the backward pass computes a chunk's logits a
second time, because the gradient of each row is known only then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cross_entropy.product import add_product
from ..cross_entropy.reference import CPU_ROWS, IGNORED
from ..softcap import softcap_slope
from ..vocabulary import WHOLE, VocabularyShard, project

GPU_ROWS = 2048
"""rows at a time on a GPU, where several times as many logits are held in fp32"""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard: VocabularyShard = WHOLE,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the log-probability of each row's label, differentiable row by row.

    Args:
        hidden: [T, D]; its dtype is that of the products.
        weight: [V, D]; any dtype; its gradient has the same and is summed in fp32 at least.
        labels: [T] class numbers; rows with -100 give 0 and have no gradient.
        shard: which classes the weight's rows are. Where ranks share the classes, all of them call
            with the same rows, and each returns its own classes' part of the hidden states'
            gradient.
        chunk: rows at a time.
        softcap: logits are capped at it, see `softcap.softcap`; None: they are not.

    Returns:
        [T] in fp32 (fp64 for fp64 input), the same on all ranks of the shard's group.
    """
    rows = chunk or _chunk_rows(hidden)
    inputs = hidden, weight, labels.unsqueeze(1)
    log_probs, _ = _apply(*inputs, 1.0, shard, rows, False, softcap)
    return log_probs.squeeze(1)


def linear_class_log_probs(
    hidden: Tensor,
    weight: Tensor,
    classes: Tensor,
    *,
    temperature: float = 1.0,
    shard: VocabularyShard = WHOLE,
    chunk: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of several classes a row, and of all other classes together.

    Args:
        hidden: see `linear_log_probs`.
        weight: see `linear_log_probs`.
        classes: [T, K] different class numbers in each row; -100 is no class and gives 0.
        temperature: the logits are divided by it.
        shard: see `linear_log_probs`.
        chunk: rows at a time.
        softcap: see `linear_log_probs`.

    Returns:
        [T, K] and [T] in fp32 (fp64 for fp64 input). Where no class is left, the second is the
        logarithm of the smallest positive number.
    """
    rows = chunk or _chunk_rows(hidden)
    return _apply(hidden, weight, classes, temperature, shard, rows, True, softcap)


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    shard: VocabularyShard = WHOLE,
    chunk: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest classes of each row and their log-probabilities, without gradient.

    Args:
        hidden: see `linear_log_probs`.
        weight: see `linear_log_probs`.
        k: how many, at most V.
        temperature: the logits are divided by it.
        shard: see `linear_log_probs`.
        chunk: rows at a time.
        softcap: see `linear_log_probs`.

    Returns:
        classes [T, k], int64, likeliest first, and their log-probabilities [T, k].
    """
    cast = weight.to(hidden.dtype)
    found = []
    for h in torch.split(hidden, chunk or _chunk_rows(hidden)):
        logits = project(h, cast, temperature, softcap)
        largest = shard.max_(logits.amax(-1))
        log_partition = largest + shard.sum_((logits - largest.unsqueeze(1)).exp_().sum(-1)).log()
        values, classes = shard.top_k(logits, k)
        found.append((classes, values - log_partition.unsqueeze(1)))
    all_classes, all_values = zip(*found, strict=True)
    return torch.cat(all_classes), torch.cat(all_values)


def _chunk_rows(hidden: Tensor) -> int:
    return CPU_ROWS if hidden.device.type == "cpu" else GPU_ROWS


def _apply(*inputs: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _LinearLogProbs.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        classes: Tensor,
        temperature: float,
        shard: VocabularyShard,
        rows: int,
        with_rest: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        cast = weight.to(hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(classes.shape, dtype=wide, device=hidden.device)
        log_rest = torch.zeros(len(classes), dtype=wide, device=hidden.device)
        log_partition = torch.empty_like(log_rest)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = project(hidden[part], cast, temperature, softcap)
            column, is_here = shard.locate(classes[part], logits.shape[1])
            chosen = logits.gather(1, column).where(is_here, 0)
            # The ranks' sums of exponentials add up only if all subtract the same maximum.
            largest = shard.max_(logits.amax(-1))
            powers = logits.sub_(largest.unsqueeze(1)).exp_()
            sums = [powers.sum(-1)]
            if with_rest:
                sums.append(_without(powers, column, is_here).sum(-1))
            # One all-reduce for all: a class's logit is on one rank, zero on the others.
            total, *rest = shard.sum_(torch.cat([torch.stack(sums), chosen.T]))
            if with_rest:
                smallest = torch.finfo(wide).tiny
                log_rest[part] = rest.pop(0).clamp(min=smallest).log() - total.log()
            log_partition[part] = largest + total.log()
            known = torch.stack(rest, 1) - log_partition[part].unsqueeze(1)
            log_probs[part] = known.where(classes[part] != IGNORED, 0)
        # Not the cast: where the dtypes differ it would be a second copy of the weight.
        ctx.save_for_backward(hidden, weight, classes, log_partition, log_rest)
        ctx.settings = temperature, shard, rows, with_rest, softcap
        return log_probs, log_rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, classes, log_partition, log_rest = ctx.saved_tensors
        temperature, shard, rows, with_rest, softcap = ctx.settings
        cast = weight.to(hidden.dtype)
        grad = grad.where(classes != IGNORED, 0) / temperature
        grad_rest = grad_rest / temperature
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = project(hidden[part], cast, temperature, softcap)
            column, is_here = shard.locate(classes[part], logits.shape[1])
            # Of the logits, before they become probabilities in place.
            cap_slope = None if softcap is None else softcap_slope(logits * temperature, softcap)
            probabilities = logits.sub_(log_partition[part].unsqueeze(1))
            total = grad[part].sum(-1)
            if with_rest:
                # d log_rest / d logit = p / rest - p for a class of the rest, -p for the others.
                # p / rest as one power: where no class is left, 1 / rest is too large a number.
                shares = (probabilities - log_rest[part].unsqueeze(1)).exp_()
                others = _without(shares, column, is_here).mul_(grad_rest[part].unsqueeze(1))
                total = total + grad_rest[part]
            probabilities.exp_()
            grad_logits = probabilities.mul_(-total.unsqueeze(1))
            if with_rest:
                grad_logits += others
            grad_logits.scatter_add_(1, column, grad[part].where(is_here, 0))
            if cap_slope is not None:
                grad_logits.mul_(cap_slope)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, cast, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = add_product(grad_weight, narrow.T, hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 6


def _without(values: Tensor, column: Tensor, is_here: Tensor) -> Tensor:
    """Return a copy of values [T, V] with zeros at this rank's columns [T, K]."""
    # What is not here is written behind the last column.
    padded = F.pad(values, (0, 1))
    return padded.scatter_(1, column.where(is_here, values.shape[1]), 0)[:, :-1]
