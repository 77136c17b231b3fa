"""What torch's flash attention for flat rows computes on a GPU, by its formulas, on a CPU.

Arguments and results are those of `aten::_flash_attention_forward` and its backward operation; the
formulas are equation 1 of arXiv:1706.03762, and algorithm 4 of arXiv:2205.14135 for gradients.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from trainer.kernels.attention import local, ragged

NAMES = ("_flash_attention_forward", "_flash_attention_backward")


def check(query, key, value, query_offsets, key_offsets, max_queries, max_keys):
    """Refuse what the kernels refuse, or would read beyond."""
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    for offsets, rows, longest in (
        (query_offsets, len(query), max_queries),
        (key_offsets, len(key), max_keys),
    ):
        assert offsets.dtype == torch.int32
        assert offsets.is_contiguous()
        assert offsets[0] == 0
        assert offsets[-1] == rows
        assert 0 <= offsets.diff().min() <= offsets.diff().max() <= longest
    assert len(query_offsets) == len(key_offsets)


def runs(query_offsets, key_offsets):
    """Yield the slices of each run of queries, and of its keys."""
    pairs = [offsets.tolist() for offsets in (query_offsets, key_offsets)]
    for first, last, start, end in zip(
        pairs[0], pairs[0][1:], pairs[1], pairs[1][1:], strict=False
    ):
        yield slice(first, last), slice(start, end)


def scores(query, key, causal, before, after):
    """Return [H, S, L]; the last query stands at the last key."""
    S, L = len(query), len(key)
    wide = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    products = torch.einsum("shk,lhk->hsl", query, wide) / query.shape[-1] ** 0.5
    place = torch.arange(S).unsqueeze(1) + L - S
    distance = place - torch.arange(L)
    hidden = torch.zeros(S, L, dtype=torch.bool)
    if before is not None and before >= 0:
        hidden |= distance > before
    if causal or (after is not None and after >= 0):
        hidden |= distance < -(0 if causal else after)
    return products.masked_fill(hidden, -torch.inf)


def forward(
    query,
    key,
    value,
    query_offsets,
    key_offsets,
    max_queries,
    max_keys,
    dropout,
    causal,
    debug,
    **how,
):
    check(query, key, value, query_offsets, key_offsets, max_queries, max_keys)
    assert dropout == 0
    # What is left out stays NaN.
    out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    sums = query.new_full((query.shape[1], len(query)), torch.nan)
    repeats = query.shape[1] // key.shape[1]
    for rows, keys in runs(query_offsets, key_offsets):
        each = scores(
            query[rows], key[keys], causal, how["window_size_left"], how["window_size_right"]
        )
        sums[:, rows] = each.logsumexp(-1)
        wide = value[keys].repeat_interleave(repeats, 1)
        out[rows] = torch.einsum("hsl,lhk->shk", each.softmax(-1), wide)
    nothing = query.new_empty(0)
    return out, sums, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def backward(
    grad,
    query,
    key,
    value,
    out,
    sums,
    query_offsets,
    key_offsets,
    max_queries,
    max_keys,
    dropout,
    causal,
    seed,
    unused,
    **how,
):
    check(query, key, value, query_offsets, key_offsets, max_queries, max_keys)
    assert grad.shape == out.shape == query.shape
    assert sums.shape == (query.shape[1], len(query))
    assert sums.is_contiguous()
    dq, dk, dv = (
        torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
        for x in (query, key, value)
    )
    groups, scale = key.shape[1], query.shape[-1] ** -0.5
    for rows, keys in runs(query_offsets, key_offsets):
        each = scores(
            query[rows], key[keys], causal, how["window_size_left"], how["window_size_right"]
        )
        weights = (each - sums[:, rows].unsqueeze(-1)).exp()
        wide_k, wide_v = (
            x[keys].repeat_interleave(query.shape[1] // groups, 1) for x in (key, value)
        )
        dots = (grad[rows] * out[rows]).sum(-1).T.unsqueeze(-1)
        slopes = weights * (torch.einsum("shk,lhk->hsl", grad[rows], wide_v) - dots) * scale
        dq[rows] = torch.einsum("hsl,lhk->shk", slopes, wide_k)
        for found, made in (
            (dk, torch.einsum("hsl,shk->lhk", slopes, query[rows])),
            (dv, torch.einsum("hsl,shk->lhk", weights, grad[rows])),
        ):
            found[keys] = made.unflatten(1, (groups, -1)).sum(2)
    return dq, dk, dv


@contextmanager
def flash_on_cpu():
    """Let a CPU run flash attention of flat rows in any dtype and width."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in zip(NAMES, (forward, backward), strict=True):
        library.impl(name, function, "CPU")
    try:
        with (
            patch.object(local, "takes_varlen", lambda _: True),
            patch.object(ragged, "takes_varlen", lambda _: True),
        ):
            yield
    finally:
        library._destroy()
