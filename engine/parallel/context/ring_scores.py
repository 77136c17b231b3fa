"""The largest attention scores of queries with the keys of all ranks in a ring."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.attention.largest import largest_scores
from .pieces import Pieces
from .rotation import rotate


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
    for source, held in rotate(key.contiguous(), group):
        for rows, keys, mask, is_causal, _ in pieces.parts(group.rank(), source, query, documents):
            part = held[:, keys]
            scores = largest_scores(query[:, rows], part, part, mask, causal=is_causal)
            found[:, rows] = torch.maximum(found[:, rows], scores)
    return found
