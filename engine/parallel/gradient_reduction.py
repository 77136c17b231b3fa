"""Reductions of gradients that neither DDP nor FSDP reduces, after the last backward of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..core.local import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def make_replicated_reduction(
    summed: Sequence[nn.Parameter],
    averaged: Sequence[nn.Parameter],
    mesh: DeviceMesh,
    device: torch.device,
) -> Callable[[], None]:
    """Return a function that reduces gradients of replicated parameters, one collective an axis.

    Args:
        summed: parameters that are replicated over the tensor axis. Each rank has seen a part of
            the sequence or of the heads, so that their gradients are summed.
        averaged: parameters that FSDP ignores. Their gradients are averaged over the data axes, as
            FSDP does with the others.
        mesh: the mesh that `build_mesh` returned.
        device: the device of collectives; gradients may be offloaded.
    """
    reductions = []
    if summed:
        reductions.append((summed, dist.ReduceOp.SUM, mesh.get_group("tensor")))
    for axis in ("shard", "replicate"):
        if averaged and mesh[axis].size() > 1:
            reductions.append((averaged, dist.ReduceOp.AVG, mesh.get_group(axis)))

    def reduce_gradients() -> None:
        for parameters, operation, group in reductions:
            gradients = [local(each.grad) for each in parameters if each.grad is not None]
            if not gradients:
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
            dist.all_reduce(flat, operation, group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    return reduce_gradients


def make_tied_reduction(
    other: int, parameters: Sequence[nn.Parameter], group: ProcessGroup, device: torch.device
) -> Callable[[], None]:
    """Return a function that sums the gradients of a tied embedding over both ends of a pipeline.

    The first and the last stage hold a copy each. Both get the same bits, because a sum of two
    numbers does not depend on their order, and so the copies stay equal.

    Args:
        other: rank in the group that holds the other copy.
        parameters: this rank's copy, laid out as on the other rank; shards are exchanged.
        group: process group of the pipeline axis.
        device: the device of the group's messages.
    """

    def reduce_gradients() -> None:
        gradients = [local(each.grad) for each in parameters if each.grad is not None]
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

    return reduce_gradients
