"""The one weight of both ends of a pipeline, of which two ranks hold a copy each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..core.local import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def summing_with(
    other: int, weights: Sequence[nn.Parameter], group: ProcessGroup, device: torch.device
) -> Callable[[], None]:
    """Return what adds the gradients of weights that another rank holds too.

    Both get the same bits: a sum of two does not depend on their order. So equal copies stay equal.

    Args:
        other: its number in the group.
        weights: laid out alike on both; each rank exchanges its part.
        group: the ranks of a pipeline.
        device: where the group's messages are.
    """

    def finish() -> None:
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        for gradient in gradients:
            ours = gradient.to(device).contiguous()
            theirs = torch.empty_like(ours)
            exchange = [
                dist.P2POp(dist.isend, ours, group=group, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradient.copy_(ours + theirs)

    return finish
