"""Flash attention of flat rows: runs of queries, each with a run of keys, in one kernel call.

Documents of packed rows are such runs, and so are queries that stand at the end of more keys. No
mask is made, and keys and values of shared heads are not repeated: what no query sees is not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import operator
from ..torch_private import attend_flash_varlen, attend_flash_varlen_backward
from .partial import add_sinks, sinks_gradient, wide_dtype
from .reference import document_mask

FLASH_MAX_WIDTH = 256
FLASH_CAPABILITY = (8, 0)
"""the least capability of a GPU that runs flash attention"""


class Documents(NamedTuple):
    """The documents of packed rows, in place of a mask; see `find_documents`."""

    queries: Tensor
    """[B, S] number of each query's document"""
    keys: Tensor
    """[B, L] number of each key's document"""
    query_offsets: Tensor
    """[B * N + 1] int32: where the queries of each document begin among all, and where they end"""
    key_offsets: Tensor
    """[B * N + 1] int32: the same of keys"""

    def mask(self, *, causal: bool) -> Tensor:
        """Return which positions see which, for kernels that need a mask: [B, 1, S, L] bool."""
        return document_mask(self.queries, self.keys, causal=causal)


def find_documents(
    queries: Tensor, keys: Tensor, *, causal: bool = True, max_documents: int | None = None
) -> Tensor | Documents:
    """Return the documents of packed rows; or a mask, where their number is not bounded.

    Nothing waits for the device: the offsets have one size, and documents that do not exist are
    empty. The bound matters, because the kernels' backward pass holds 128 rows more a document.

    Args:
        queries: see `document_mask`.
        keys: see there.
        causal: see there; else S = L.
        max_documents: the most documents of a row, N.
    """
    if max_documents is None:
        return document_mask(queries, keys, causal=causal)
    assert causal or queries.shape == keys.shape, "queries are all positions of their documents"
    B, L = keys.shape
    S = queries.shape[1]
    is_later_BL = F.pad(keys[:, 1:] != keys[:, :-1], (1, 0))
    wanted_BN = torch.arange(max_documents, device=keys.device).expand(B, -1).contiguous()
    # Document n starts where n starts are counted first, or at the end if there is none.
    starts_BN = torch.searchsorted(is_later_BL.cumsum(1), wanted_BN)
    # The last query stands at the last key. Documents that end before the first query have none.
    query_starts_BN = (starts_BN - (L - S)).clamp(min=0)
    return Documents(queries, keys, _row_offsets(query_starts_BN, S), _row_offsets(starts_BN, L))


def _row_offsets(starts_BN: Tensor, length: int) -> Tensor:
    """Return offsets in all rows, [B * N + 1] int32, from offsets in each row of a length."""
    rows_B1 = torch.arange(len(starts_BN), device=starts_BN.device).unsqueeze(1) * length
    # The end is the pad's value: no number travels from the host.
    return F.pad((starts_BN + rows_B1).flatten(), (0, 1), value=len(starts_BN) * length).int()


def takes_varlen(query: Tensor) -> bool:
    """Whether flash attention takes the dtype and the width of heads."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return is_half and query.shape[-1] % 8 == 0 and query.shape[-1] <= FLASH_MAX_WIDTH


def has_flash() -> bool:
    """Whether this machine's GPU runs flash attention; AMD's were not tried."""
    if torch.version.hip:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLASH_CAPABILITY


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attend within documents, or to all keys up to the own one; see `local.attend`.

    Args:
        query: [B, S, H, K].
        key: [B, L, G, K] with L >= S.
        value: [B, L, G, W] with W <= K.
        documents: those of the rows; None: each row is one.
        window: see `local.attend`.
        sinks: see there.
        causal: see there.

    Returns:
        [B, S, H, W].
    """
    B, S = query.shape[:2]
    L = key.shape[1]
    if documents is None:
        starts_B1 = torch.zeros(B, 1, dtype=torch.int64, device=query.device)
        offsets = _row_offsets(starts_B1, S), _row_offsets(starts_B1, L)
    else:
        offsets = documents.query_offsets, documents.key_offsets
    q_THK, k_UGK, v_UGW = (x.flatten(0, 1) for x in (query, key, value))
    limits: dict[str, Any] = {"window": window, "sinks": sinks, "causal": causal}
    out = attend_runs(q_THK, k_UGK, v_UGW, *offsets, longest=(S, L), **limits)
    return out.view(B, S, *out.shape[1:])


def attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    *,
    longest: tuple[int, int],
    window: int | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attend from each run of queries to its run of keys; the last of both stand together.

    Args:
        query: [T, H, K].
        key: [U, G, K].
        value: [U, G, W] with W <= K.
        query_offsets: [N + 1] int32, where each run of queries begins, and T.
        key_offsets: [N + 1] int32, where each run of keys begins, and U.
        longest: a number that no run of queries exceeds, and one for keys.
        window: see `local.attend`.
        sinks: see there.
        causal: see there.

    Returns:
        [T, H, W].
    """
    W, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing:
        value = F.pad(value, (0, missing))  # flash attention has one width for all
    before = -1 if window is None else window - 1
    out, _ = _varlen(
        *(query, key, value, sinks, query_offsets, key_offsets), *longest, before, causal
    )
    return out[..., :W]


def _reach(before: int, causal: bool) -> tuple[bool, dict[str, int]]:
    """Return `is_causal` and the window of the kernels: which keys a query sees; -1 is all."""
    is_causal = causal and before < 0
    # With a window, causality is a window of no later keys.
    after = 0 if causal and not is_causal else -1
    return is_causal, {"window_size_left": before, "window_size_right": after}


def _varlen_like(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
    before: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    sums = query.new_empty(query.shape[1], len(query), dtype=wide_dtype(query.dtype))
    return torch.empty_like(query, memory_format=torch.contiguous_format), sums


@operator("varlen_attention", fake=_varlen_like)
def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
    before: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, K], and the log sums [H, T] that softmax divides by."""
    # `torch.nn.attention.varlen.varlen_attn` calls the same kernel, and gives log sums no
    # gradient, which sinks need.
    is_causal, window = _reach(before, causal)
    out, sums, *_ = attend_flash_varlen(
        *(query, key, value, query_offsets, key_offsets, max_queries, max_keys),
        *(0.0, is_causal, False),
        **window,
    )
    if sinks is not None:
        with_sinks, total = add_sinks(out.unsqueeze(0), sums.unsqueeze(0), sinks)
        out, sums = with_sinks[0].to(query.dtype), total[0].contiguous()
    return out, sums


def _like_inputs(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )


@operator("varlen_attention_backward", fake=_like_inputs)
def _varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
    before: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `sums` may include the sinks'."""
    # The random state of dropout, which is not used.
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    is_causal, window = _reach(before, causal)
    dq, dk, dv = attend_flash_varlen_backward(
        *(grad.contiguous(), query, key, value, out, sums, query_offsets, key_offsets),
        *(max_queries, max_keys, 0.0, is_causal, seed, unused),
        **window,
    )
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, query_offsets, key_offsets, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, sinks, query_offsets, key_offsets, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, query_offsets, key_offsets, out, sums = ctx.saved_tensors
    # With the total that includes the sink, the kernel computes the right weights.
    found = _varlen_backward(
        *(grad, query, key, value, out, sums, query_offsets, key_offsets), *ctx.how
    )
    for_sinks = None
    if sinks is not None:
        for_sinks = sinks_gradient(grad.unsqueeze(0), out.unsqueeze(0), sums.unsqueeze(0), sinks)
    return *found, for_sinks, *[None] * 6


_varlen.register_autograd(_differentiate, setup_context=_keep)
