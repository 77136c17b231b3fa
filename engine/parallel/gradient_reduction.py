"""Reduces gradients: with DDP for replicas, and those that neither DDP nor FSDP reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..core.local import local
from .axis import AxisParts, LocalParts, LocalRank, ParallelModel, StepSettings


@dataclass(frozen=True)
class ReplicaParts(AxisParts):
    """Replicates a model over ranks with DDP, which averages gradients in buckets."""

    only_reduces_gradients: ClassVar[bool] = True

    local: LocalRank

    def wrap(
        self, wrapped: ParallelModel, parts: LocalParts, settings: StepSettings
    ) -> ParallelModel:
        """Wrap a model in DDP."""
        device, model = self.local.device, wrapped.model
        # Torch 2.13 renamed this argument and warns of the old name; `max` prefers the new one.
        names = {"broadcast_buffers", "forward_sync_buffers"}
        known = names & signature(DistributedDataParallel).parameters.keys()
        options: dict[str, Any] = {max(known): False}
        ddp = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            **options,
            gradient_as_bucket_view=True,
            init_sync=False,  # the initial values are the same on each rank by construction
        )
        # Without the hook DDP averages gradients in the dtype of their weights.
        dtypes = {settings.reduce, *(weight.dtype for weight in model.parameters())}
        if torch.bfloat16 in dtypes:
            ddp.register_comm_hook(settings.reduce, _average)

        def synchronize(last: bool) -> None:
            # What `ddp.no_sync()` sets; that context would have to enclose forward and backward.
            ddp.require_backward_grad_sync = last

        return replace(
            wrapped,
            forward=ddp,
            set_gradient_sync=synchronize,
            gradient_divisor=self.local.degrees.dp_cp,
            owns_gradient_buffers=True,
        )


def make_axis(local: LocalRank) -> ReplicaParts:
    """Return what DDP does on this rank."""
    return ReplicaParts(local)


# Torch looks at the annotations of a hook, and takes none that are texts.
def _average(dtype, bucket):  # type: ignore[no-untyped-def]
    """Average gradients over ranks in a dtype; torch's own hook for it takes no CPU tensors."""
    gradients = bucket.buffer()
    # The world size: DDP runs only where every rank holds the whole model.
    sent = gradients.to(dtype).div_(dist.get_world_size())
    work = cast("dist.Work", dist.all_reduce(sent, async_op=True))
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def make_replicated_reduction(
    parameters: Sequence[nn.Parameter],
    operation: dist.ReduceOp.RedOpType,
    groups: Sequence[ProcessGroup],
    device: torch.device,
) -> Callable[[], None]:
    """Return a function that reduces gradients of replicated parameters, one collective per group.

    Args:
        parameters: the parameters, which every rank of the groups holds whole.
        operation: SUM or AVG.
        groups: process groups over which the gradients are reduced, one after the other.
        device: the device of the collectives, to which offloaded gradients are copied.
    """

    def reduce_gradients() -> None:
        gradients = [local(each.grad) for each in parameters if each.grad is not None]
        for group in groups if gradients else ():
            # One collective for all parameters: most of them are norms of a few bytes.
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            # Gradients of weights in bf16 are added up in fp32.
            flat = flat.to(device, torch.promote_types(flat.dtype, torch.float32))
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
        device: the device of the messages, to which offloaded gradients are copied.
    """

    def reduce_gradients() -> None:
        gradients = [local(each.grad) for each in parameters if each.grad is not None]
        for gradient in gradients:
            ours = gradient.to(device).contiguous()
            theirs = torch.empty_like(ours)
            # Point to point: an all-reduce over the pipeline axis would include middle stages.
            exchange = [
                dist.P2POp(dist.isend, ours, group=group, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradient.copy_(ours + theirs)

    return reduce_gradients
