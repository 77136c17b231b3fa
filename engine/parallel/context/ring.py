"""Ring attention (Liu et al. 2023, arXiv:2310.01889): ranks pass their keys and values around, and
attend to those at hand meanwhile.

A rank holds two pieces of each sequence, see `ContextParallel`. Of an earlier rank's keys its
queries see the first piece, all of them; of a later rank's keys its second piece's queries see
both. So each step is the same work on every rank, and nothing is computed to be masked away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup, Work

from ....kernels.attention.partial import PartialAttention, wide_dtype
from ....kernels.choose import PARTIAL_ATTENTION


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    *,
    kernel: PartialAttention,
    group: ProcessGroup,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks up to their own position.

    Args:
        query: [B, S, H, K], the rank's two pieces one after the other.
        key: [B, S, G, K]; query head h reads key head h // (H / G).
        value: [B, S, G, W].
        documents: [B, C, S] document of each position, for each of the C ranks; attention stays
            inside documents. None: a row is one.
        kernel: attends to a part of the keys.
        group: the C ranks.

    Returns:
        [B, S, H, W].
    """
    pair = torch.cat([key, value], -1)
    if torch.compiler.is_compiling():
        out: Tensor = _operation(query, pair, documents, kernel.name, group.group_name)[0]
        return out
    return cast("Tensor", _Ring.apply(query, pair, documents, kernel, group))  # type: ignore[no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        pair: Tensor,
        documents: Tensor | None,
        kernel: PartialAttention,
        group: ProcessGroup,
    ) -> Tensor:
        out, log_sums = _forward(query, pair, documents, kernel, group)
        ctx.save_for_backward(query, pair, documents, out, log_sums)
        ctx.kernel, ctx.group = kernel, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, documents, out, log_sums = ctx.saved_tensors
        found = _backward(grad, query, pair, documents, out, log_sums, ctx.kernel, ctx.group)
        return *found, None, None, None


def _forward(
    query: Tensor,
    pair: Tensor,
    documents: Tensor | None,
    kernel: PartialAttention,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log of the sums that softmax divides by, [B, H, S]."""
    mine, (batch, length, heads, width) = group.rank(), query.shape
    shape = (batch, length, heads, pair.shape[-1] - width)
    out = query.new_empty(shape, dtype=wide_dtype(query.dtype))
    log_sums = out.new_empty((batch, heads, length))
    for source, held in _rotate(pair, group):
        key, value = held[..., :width], held[..., width:]
        for rows, keys in _seen(mine, source, length, documents is not None):
            mask = _mask(documents, mine, source, rows, keys)
            is_causal = mask is None and source == mine
            part, its_sums = kernel.forward(
                query[:, rows], key[:, keys], value[:, keys], mask, is_causal
            )
            if source == mine:  # the first: each query sees its own key at least
                out[:, rows], log_sums[..., rows] = part, its_sums
                continue
            sums = log_sums[..., rows]
            share = torch.sigmoid(its_sums - sums).transpose(1, 2).unsqueeze(-1)
            out[:, rows].lerp_(part.to(out.dtype), share)
            sums.copy_(torch.logaddexp(sums, its_sums))
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
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `query` and `pair`.

    A pair's gradient follows it around, a step behind: each rank adds its part and passes it on.
    """
    mine, length, width = group.rank(), query.shape[1], query.shape[-1]
    grad = grad.contiguous()
    query_grad = torch.zeros_like(query, dtype=log_sums.dtype)
    pair_grad = torch.zeros_like(pair, dtype=log_sums.dtype)
    spare, works = torch.empty_like(pair_grad), list[Work]()
    for source, held in _rotate(pair, group):
        key, value = held[..., :width], held[..., width:]
        found = []
        for rows, keys in _seen(mine, source, length, documents is not None):
            mask = _mask(documents, mine, source, rows, keys)
            gradients = kernel.backward(
                grad[:, rows],
                query[:, rows],
                key[:, keys],
                value[:, keys],
                out[:, rows],
                log_sums[..., rows],
                mask,
                mask is None and source == mine,
            )
            found.append((rows, keys, *gradients))
        _wait(works)
        for rows, keys, for_query, for_key, for_value in found:
            query_grad[:, rows] += for_query
            pair_grad[:, keys, :, :width] += for_key
            pair_grad[:, keys, :, width:] += for_value
        works = _pass_on(pair_grad, spare, group)
        pair_grad, spare = spare, pair_grad
    _wait(works)
    return query_grad.to(query.dtype), pair_grad.to(pair.dtype)


def _seen(mine: int, source: int, length: int, with_mask: bool) -> list[tuple[slice, slice]]:
    """Return which queries of a rank see which keys of another."""
    first, second, both = slice(length // 2), slice(length // 2, None), slice(None)
    if source < mine:
        return [(both, first)]
    if source > mine:
        return [(second, both)]
    return [(first, first), (second, both)] if with_mask else [(both, both)]


def _mask(
    documents: Tensor | None, mine: int, source: int, rows: slice, keys: slice
) -> Tensor | None:
    """Return [B, 1, queries, keys], true where a query sees a key; None without documents."""
    if documents is None:
        return None
    mask = documents[:, mine, rows].unsqueeze(2) == documents[:, source, keys].unsqueeze(1)
    if mine == source:
        mask = mask.tril(mask.shape[2] - mask.shape[1])
    return mask.unsqueeze(1)


def _rotate(pair: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number and pair, this rank's first; the next one travels meanwhile."""
    ranks = group.size()
    spare = [torch.empty_like(pair) for _ in range(min(2, ranks - 1))]
    for step in range(ranks - 1):
        received = spare[step % 2]
        works = _pass_on(pair, received, group)
        yield (group.rank() - step) % ranks, pair
        _wait(works)
        pair = received
    yield (group.rank() + 1) % ranks, pair


def _pass_on(sent: Tensor, received: Tensor, group: ProcessGroup) -> list[Work]:
    """Start to send to the next rank, and to receive from the one before."""
    rank, ranks = group.rank(), group.size()
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


def _group(name: Any) -> ProcessGroup:
    return _resolve_process_group(name)


# Compiled blocks see one operation, and not what it does.


@torch.library.custom_op(
    "trainer::ring_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor pair, Tensor? documents, str kernel, str group)"
    " -> (Tensor, Tensor)",
)
def _operation(
    query: Tensor, pair: Tensor, documents: Tensor | None, kernel: str, group: str
) -> tuple[Tensor, Tensor]:
    out, log_sums = _forward(query, pair, documents, PARTIAL_ATTENTION[kernel], _group(group))
    return out.contiguous(), log_sums.contiguous()


@torch.library.custom_op(
    "trainer::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor pair, Tensor? documents, Tensor out,"
    " Tensor log_sums, str kernel, str group) -> (Tensor, Tensor)",
)
def _operation_backward(
    grad: Tensor,
    query: Tensor,
    pair: Tensor,
    documents: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    kernel: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    query_grad, pair_grad = _backward(
        grad,
        query,
        pair,
        documents,
        out,
        log_sums,
        PARTIAL_ATTENTION[kernel],
        _group(group),
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
    query, pair, documents, ctx.kernel, ctx.group = inputs
    ctx.save_for_backward(query, pair, documents, *output)


def _differentiate(ctx: Any, grad: Tensor, _sums_grad: Tensor) -> tuple[Tensor | None, ...]:
    found = _operation_backward(grad, *ctx.saved_tensors, ctx.kernel, ctx.group)
    return *found, None, None, None


_operation.register_autograd(_differentiate, setup_context=_keep)
