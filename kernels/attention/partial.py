"""Attention to some of the keys, in a form that is merged with attention to the others.

`forward` also returns the log of the sum that softmax divides by. From it, and from the output over
all keys, `backward` finds what these keys contribute to the gradients (Dao et al. 2022,
arXiv:2205.14135, section 3.1 and algorithm 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..softcap import softcap as cap_softly
from ..softcap import softcap_slope


class PartialAttention(NamedTuple):
    """One implementation.

    Attributes:
        name: "matmul" or "sdpa".
        forward: (query, key, value, mask, causal, softcap) -> (out, log_sums).
        backward: (grad, query, key, value, out, log_sums, mask, causal, softcap) -> gradients of
            query, key and value; `out` and `log_sums` are those over all keys.

    Shapes: query [B, S, H, K]; key [B, L, G, K] and value [B, L, G, W] with W <= K, where query
    head h reads head h // (H / G); out and grad [B, S, H, W]; mask [B, 1, S, L] bool, true where a
    query sees a key, a query may see none; causal: S = L, and each query sees the keys up to its
    own; not with a mask; softcap: see `reference.sdpa`, None by default. `log_sums` is [B, H, S],
    fp32, or fp64 for such inputs. Where a query sees nothing it is so low that the output, which is
    finite, has no weight.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def add_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add to attention over all keys one more key for each head, whose value is zero.

    Args:
        out: [B, S, H, W].
        log_sums: [B, H, S].
        sinks: the scores of these keys, [H].

    Returns:
        `out`, with the share of attention that goes to keys, and `log_sums`, with the sinks'.
    """
    # [B, S, H] beside the output.
    sums_BSH, sinks_H = log_sums.transpose(1, 2), sinks.to(log_sums.dtype)
    # exp(sums) / (exp(sums) + exp(sinks)): the share of attention that goes to keys.
    share = torch.sigmoid(sums_BSH - sinks_H)
    total = torch.logaddexp(sums_BSH, sinks_H).transpose(1, 2)
    return out * share.unsqueeze(-1), total


def sinks_gradient(grad: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of `sinks`; `out` and `log_sums` are those that `add_sinks` returned."""
    taken_BHS = torch.exp(sinks.to(log_sums.dtype).unsqueeze(1) - log_sums)
    dots_BSH = (grad.to(log_sums.dtype) * out.to(log_sums.dtype)).sum(-1)
    return -(taken_BHS * dots_BSH.transpose(1, 2)).sum((0, 2)).to(sinks.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over parts are kept."""
    return torch.promote_types(dtype, torch.float32)


def masked_score(dtype: torch.dtype) -> float:
    """Return the score of a key that is not seen."""
    # Not -inf: the difference of two is NaN. A quarter, as some kernels count in powers of 2.
    return torch.finfo(dtype).min / 4


def _matmul_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with plain products, in any dtype on any device."""
    q_BGRSK, k_BGLK, v_BGLW = _group_heads(query, key), key.transpose(1, 2), value.transpose(1, 2)
    outs, sums = [], []
    for rows, end in _pieces(query.shape[1], key.shape[1], causal):
        q = q_BGRSK[:, :, :, rows]
        scores = _scores(q, k_BGLK[:, :, :end], mask, rows, causal, softcap)
        lse = scores.logsumexp(-1, keepdim=True)
        # The log sum normalises: no second pass over the scores for softmax.
        weights = (scores - lse).exp_().to(query.dtype)
        out = weights.flatten(2, 3) @ v_BGLW[:, :, :end]
        outs.append(out.view(*weights.shape[:-1], -1))
        sums.append(lse.squeeze(-1))
    return _ungroup_heads(torch.cat(outs, 3)), torch.cat(sums, 3).flatten(1, 2)


def _matmul_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    q_BGRSK, k_BGLK, v_BGLW = _group_heads(query, key), key.transpose(1, 2), value.transpose(1, 2)
    g_BGRSW, o_BGRSW = _group_heads(grad, key), _group_heads(out, key)
    lse_BGRS = log_sums.view(q_BGRSK.shape[:4])
    # The sum over all keys of each weight times its gradient equals dot(grad, out), so that these
    # keys need not know the others (arXiv:2205.14135, section 3.1).
    dots_BGRS = (g_BGRSW.to(log_sums.dtype) * o_BGRSW.to(log_sums.dtype)).sum(-1)
    dq = torch.empty_like(q_BGRSK)
    # Pieces of queries, and the heads of a group, add to the same keys.
    dk, dv = torch.zeros_like(k_BGLK), torch.zeros_like(v_BGLW)
    for rows, end in _pieces(query.shape[1], key.shape[1], causal):
        q, g = (x[:, :, :, rows] for x in (q_BGRSK, g_BGRSW))
        scores = _scores(q, k_BGLK[:, :, :end], mask, rows, causal, softcap)
        cap_slope = None if softcap is None else softcap_slope(scores, softcap)
        weights = scores.sub_(lse_BGRS[..., rows].unsqueeze(-1)).exp_()
        g_BGTW, q_BGTK = g.flatten(2, 3), q.flatten(2, 3)
        # Products run in the inputs' dtype, for tensor cores; softmax itself is fp32.
        dv[:, :, :end] += weights.to(query.dtype).flatten(2, 3).mT @ g_BGTW
        slopes = (g_BGTW @ v_BGLW[:, :, :end].mT).view(weights.shape).to(weights.dtype)
        slopes = (slopes - dots_BGRS[..., rows].unsqueeze(-1)).mul_(weights)
        if cap_slope is not None:
            slopes = slopes.mul_(cap_slope)
        slopes_BGTL = slopes.mul_(query.shape[-1] ** -0.5).to(query.dtype).flatten(2, 3)
        dq[:, :, :, rows] = (slopes_BGTL @ k_BGLK[:, :, :end]).view_as(q)
        dk[:, :, :end] += slopes_BGTL.mT @ q_BGTK
    return _ungroup_heads(dq), dk.transpose(1, 2), dv.transpose(1, 2)


def _group_heads(x: Tensor, key: Tensor) -> Tensor:
    """Return [B, G, R, S, K]: query heads by the key head that they read."""
    B, S, H, K = x.shape
    G = key.shape[2]
    return x.view(B, S, G, H // G, K).permute(0, 2, 3, 1, 4)


def _ungroup_heads(x_BGRSK: Tensor) -> Tensor:
    return x_BGRSK.flatten(1, 2).transpose(1, 2)


def _pieces(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """Yield queries, and the end of the keys that they see: causal ones are worth cutting."""
    rows = max(64, -(-queries // 8)) if causal else queries
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        yield slice(first, last), last if causal else keys


def _scores(
    q_BGRSK: Tensor,
    k_BGLK: Tensor,
    mask: Tensor | None,
    rows: slice,
    causal: bool,
    softcap: float | None,
) -> Tensor:
    """Return [B, G, R, S, L] of some rows, in a wide dtype, very low where a query sees no key."""
    products = (q_BGRSK.flatten(2, 3) @ k_BGLK.mT).view(*q_BGRSK.shape[:4], -1)
    # Not in place: what recomputation has kept of a product is not to be changed.
    scores: Tensor = products.to(wide_dtype(products.dtype)) * q_BGRSK.shape[-1] ** -0.5
    if softcap is not None:
        scores = cap_softly(scores, softcap)
    hidden = None
    if causal:
        S, L = scores.shape[-2:]
        hidden = torch.ones(S, L, dtype=torch.bool, device=scores.device).triu(L - S + 1)
    elif mask is not None:
        hidden = ~mask[:, :, rows].unsqueeze(1)
    return scores if hidden is None else scores.masked_fill_(hidden, masked_score(scores.dtype))


MATMUL = PartialAttention("matmul", _matmul_forward, _matmul_backward)
