"""Rows from each rank to each, by torch's collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all_v(
    x: Tensor, splits: Tensor, max_rows: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the rows that the ranks sent to this one, in their order, and how many each sent.

    The host waits for the device, since torch's collective wants its splits there.

    Args:
        x: [T, D], sorted by the rank that rows go to; rows that splits have and x has not are 0.
        splits: int64 [W], how many rows go to each rank.
        max_rows: how many the result has room for. Those that come after are dropped; the counts
            show it.
        group: of W ranks, each of which calls this.

    Returns:
        [max_rows, D], 0 behind the last row that came, and int64 [W].
    """
    received = torch.empty_like(splits)
    dist.all_to_all_single(received, splits.contiguous(), group=group)
    send, receive = splits.tolist(), received.tolist()
    rows = x.new_zeros(sum(send), x.shape[1])
    rows[: len(x)] = x[: len(rows)]
    came = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(came, rows, receive, send, group=group)
    out = x.new_zeros(max_rows, x.shape[1])
    out[: len(came)] = came[:max_rows]
    return out, received
