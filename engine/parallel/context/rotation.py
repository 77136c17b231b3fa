"""Messages around a ring of ranks, in which each tensor comes to every rank once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work


def rotate(pair: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number and pair, this rank's first, while the next pair is received."""
    ranks = group.size()
    # Two buffers, because one is received while the other is read and sent on.
    spare = [torch.empty_like(pair) for _ in range(min(2, ranks - 1))]
    for step in range(ranks - 1):
        received = spare[step % 2]
        works = pass_on(pair, received, group)
        yield (group.rank() - step) % ranks, pair
        wait_for(works)
        pair = received
    yield (group.rank() + 1) % ranks, pair


def pass_on(sent: Tensor, received: Tensor, group: ProcessGroup) -> list[Work]:
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


def wait_for(works: list[Work]) -> None:
    """Wait for messages."""
    for work in works:
        work.wait()
