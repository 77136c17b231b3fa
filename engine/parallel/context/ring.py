"""Ring attention (Liu et al. 2023, arXiv:2310.01889): ranks pass keys and values around in a ring,
and attend to those that they hold while the next ones are sent.

Each rank holds two pieces of each sequence, see `ContextParallel`. All queries of a rank see the
first piece of an earlier rank's keys. Only the queries of its second piece see a later rank's keys,
both pieces. So each step is the same work on every rank, and only a rank's own keys need a causal
mask. Where attention has windows or chunks, blocks of queries leave out the keys beyond: see
`pieces`. A sink is one more key: it is added once, to the sums over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ....kernels.attention.largest import largest_scores
from ....kernels.attention.partial import (
    PartialAttention,
    add_sinks,
    sinks_gradient,
    wide_dtype,
)
from ....kernels.choose import PARTIAL_ATTENTION
from ....kernels.torch_private import resolve_process_group
from .pieces import Pieces


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    *,
    kernel: PartialAttention,
    group: ProcessGroup,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks up to their own position.

    Args:
        query: [B, S, H, K]; S positions are this rank's two pieces, one after the other.
        key: [B, S, G, K]; query head h reads key head h // (H / G).
        value: [B, S, G, W].
        documents: document of each position of the C ranks, [B, C, S]; attention stays inside
            documents. None: each row is one document.
        kernel: computes attention to a part of the keys.
        group: process group of the C ranks.
        window: see `kernels.attention.local.attend`.
        chunk: see there; not with documents, in which chunks are told apart.
        sinks: see there.
        softcap: see there.

    Returns:
        the attention output, [B, S, H, W].
    """
    # One message a step, because its latency counts.
    pair = torch.cat([key, value], -1)
    # Operators of torch.library take no process group or kernel, but their names.
    if torch.compiler.is_compiling():
        names = kernel.name, group.group_name
        out: Tensor = _operation(query, pair, documents, sinks, *names, window, chunk, softcap)[0]
        return out
    how = kernel, group, Pieces(group.size(), query.shape[1] // 2, window, chunk), softcap
    return cast("Tensor", _Ring.apply(query, pair, documents, sinks, *how))  # type: ignore[no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        pair: Tensor,
        documents: Tensor | None,
        sinks: Tensor | None,
        kernel: PartialAttention,
        group: ProcessGroup,
        pieces: Pieces,
        softcap: float | None,
    ) -> Tensor:
        how = kernel, group, pieces, softcap
        out, log_sums = _forward(query, pair, documents, sinks, *how)
        ctx.save_for_backward(query, pair, documents, sinks, out, log_sums)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, documents, sinks, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        found = _backward(grad, query, pair, documents, out, log_sums, *ctx.how)
        for_sinks = None if sinks is None else sinks_gradient(grad, out, log_sums, sinks)
        return *found, None, for_sinks, None, None, None, None


def _forward(
    query: Tensor,
    pair: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    kernel: PartialAttention,
    group: ProcessGroup,
    pieces: Pieces,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log of the sums that softmax divides by, [B, H, S]."""
    mine, (batch, length, heads, width) = group.rank(), query.shape
    shape = (batch, length, heads, pair.shape[-1] - width)
    # In fp32 at least: the output is a sum over C steps, which bf16 would round at each.
    out = query.new_empty(shape, dtype=wide_dtype(query.dtype))
    log_sums = out.new_empty((batch, heads, length))
    for source, held in _rotate(pair, group):
        key, value = held[..., :width], held[..., width:]
        parts = pieces.parts(mine, source, query, documents)
        for rows, keys, mask, is_causal, is_first in parts:
            part, its_sums = kernel.forward(
                query[:, rows], key[:, keys], value[:, keys], mask, is_causal, softcap
            )
            if is_first:
                out[:, rows], log_sums[..., rows] = part, its_sums
                continue
            sums = log_sums[..., rows]
            # The part's share of both softmax sums, exp(b) / (exp(a) + exp(b)), without overflow.
            share = torch.sigmoid(its_sums - sums).transpose(1, 2).unsqueeze(-1)
            out[:, rows].lerp_(part.to(out.dtype), share)
            sums.copy_(torch.logaddexp(sums, its_sums))
    if sinks is not None:
        out, log_sums = add_sinks(out, log_sums, sinks)
    return out.to(query.dtype), log_sums


def _backward(
    grad: Tensor,
    query: Tensor,
    pair: Tensor,
    documents: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    kernel: PartialAttention,
    group: ProcessGroup,
    pieces: Pieces,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `query` and `pair`.

    The gradient of a pair follows the pair around the ring, one step behind: each rank adds its
    part and passes it on, and after C steps the sum is back at the rank of the pair.
    """
    mine, width = group.rank(), query.shape[-1]
    query_grad = torch.zeros_like(query, dtype=log_sums.dtype)
    pair_grad = torch.zeros_like(pair, dtype=log_sums.dtype)
    spare, works = torch.empty_like(pair_grad), list[Work]()
    for source, held in _rotate(pair, group):
        key, value = held[..., :width], held[..., width:]
        found = []
        for rows, keys, mask, is_causal, _ in pieces.parts(mine, source, query, documents):
            gradients = kernel.backward(
                grad[:, rows],
                query[:, rows],
                key[:, keys],
                value[:, keys],
                out[:, rows],
                log_sums[..., rows],
                mask,
                is_causal,
                softcap,
            )
            found.append((rows, keys, *gradients))
        # Only now, so that the kernels above overlap with the message that brings this gradient.
        _wait(works)
        for rows, keys, for_query, for_key, for_value in found:
            query_grad[:, rows] += for_query
            pair_grad[:, keys, :, :width] += for_key
            pair_grad[:, keys, :, width:] += for_value
        works = _pass_on(pair_grad, spare, group)
        pair_grad, spare = spare, pair_grad
    _wait(works)
    return query_grad.to(query.dtype), pair_grad.to(pair.dtype)


def ring_largest_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001 # called as `ring_attention` is
    documents: Tensor | None = None,
    *,
    group: ProcessGroup,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,  # noqa: ARG001
    softcap: float | None = None,  # noqa: ARG001
) -> Tensor:
    """Return the largest score of each query of this rank with the keys of all ranks, [B, S, H, 1].

    See `ring_attention` for the arguments, and `kernels.attention.largest` for the scores.
    """
    pieces = Pieces(group.size(), query.shape[1] // 2, window, chunk)
    found = query.new_full((*query.shape[:3], 1), -torch.inf)
    for source, held in _rotate(key.contiguous(), group):
        for rows, keys, mask, is_causal, _ in pieces.parts(group.rank(), source, query, documents):
            part = held[:, keys]
            scores = largest_scores(query[:, rows], part, part, mask, causal=is_causal)
            found[:, rows] = torch.maximum(found[:, rows], scores)
    return found


def _rotate(pair: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number and pair, this rank's first, while the next pair is received."""
    ranks = group.size()
    # Two buffers, because one is received while the other is read and sent on.
    spare = [torch.empty_like(pair) for _ in range(min(2, ranks - 1))]
    for step in range(ranks - 1):
        received = spare[step % 2]
        works = _pass_on(pair, received, group)
        yield (group.rank() - step) % ranks, pair
        _wait(works)
        pair = received
    yield (group.rank() + 1) % ranks, pair


def _pass_on(sent: Tensor, received: Tensor, group: ProcessGroup) -> list[Work]:
    """Start sending to the next rank and receiving from the previous one."""
    rank, ranks = group.rank(), group.size()
    # In one batch: separate sends around a ring could wait for each other under NCCL.
    found: list[Work] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    return found


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


def _resolve(
    query: Tensor,
    kernel: str,
    name: Any,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> tuple[PartialAttention, ProcessGroup, Pieces, float | None]:
    group: ProcessGroup = resolve_process_group(name)
    pieces = Pieces(group.size(), query.shape[1] // 2, window, chunk)
    return PARTIAL_ATTENTION[kernel], group, pieces, softcap


# Compiled blocks see one operation and nothing inside it: Dynamo need not trace its messages.


@torch.library.custom_op(
    "trainer::ring_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor pair, Tensor? documents, Tensor? sinks, str kernel, str group,"
    " int? window, int? chunk, float? softcap) -> (Tensor, Tensor)",
)
def _operation(
    query: Tensor, pair: Tensor, documents: Tensor | None, sinks: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor]:
    out, log_sums = _forward(query, pair, documents, sinks, *_resolve(query, *how))
    # The strides must be those that the fake implementation below promises to inductor.
    return out.contiguous(), log_sums.contiguous()


@torch.library.custom_op(
    "trainer::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor pair, Tensor? documents, Tensor out,"
    " Tensor log_sums, str kernel, str group, int? window, int? chunk, float? softcap)"
    " -> (Tensor, Tensor)",
)
def _operation_backward(
    grad: Tensor,
    query: Tensor,
    pair: Tensor,
    documents: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    *how: Any,
) -> tuple[Tensor, Tensor]:
    query_grad, pair_grad = _backward(
        grad.contiguous(), query, pair, documents, out, log_sums, *_resolve(query, *how)
    )
    return query_grad.contiguous(), pair_grad.contiguous()


@_operation.register_fake
def _(query: Tensor, pair: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, length, heads, width = query.shape
    log_sums = query.new_empty((rows, heads, length), dtype=wide_dtype(query.dtype))
    return query.new_empty((rows, length, heads, pair.shape[-1] - width)), log_sums


@_operation_backward.register_fake
def _(_grad: Tensor, query: Tensor, pair: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), pair.new_empty(pair.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, pair, documents, sinks, *ctx.how = inputs
    ctx.save_for_backward(query, pair, documents, sinks, *output)


def _differentiate(ctx: Any, grad: Tensor, _sums_grad: Tensor) -> tuple[Tensor | None, ...]:
    query, pair, documents, sinks, out, log_sums = ctx.saved_tensors
    found = _operation_backward(grad, query, pair, documents, out, log_sums, *ctx.how)
    for_sinks = None if sinks is None else sinks_gradient(grad, out, log_sums, sinks)
    return *found, None, for_sinks, *[None] * 5


_operation.register_autograd(_differentiate, setup_context=_keep)
